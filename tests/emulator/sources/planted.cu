// Kernels with a mistake each, and what they are without it. For tests of the emulated device.
#include "common.cuh"

// The sum of each block's elements.
template <bool FIRST> __device__ __forceinline__ void block_sums(const float* x, float* y) {
  SHARED(float, sums, 8);
  const float sum = warp_sum(x[first_item()]);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  if (FIRST) __syncthreads();
  float total = 0;
  for (int i = 0; i < 8; i++) total += sums[i];
  y[first_item()] = total;
}
extern "C" __global__ void sums(const float* x, float* y) { block_sums<true>(x, y); }
EXPORT(sums)
extern "C" __global__ void sums_without_barrier(const float* x, float* y) { block_sums<false>(x, y); }
EXPORT(sums_without_barrier)

// Elements of a block in reverse; twice through one array, so that a block needs a barrier between reading and writing again.
template <bool SECOND> __device__ __forceinline__ void reverse_twice(const float* x, float* y) {
  SHARED(float, elements, 256);
  float value = x[first_item()];
  for (int i = 0; i < 2; i++) {
    elements[threadIdx.x] = value;
    __syncthreads();
    value = elements[blockDim.x - 1 - threadIdx.x];
    if (SECOND) __syncthreads();
  }
  y[first_item()] = value;
}
extern "C" __global__ void reversed_twice(const float* x, float* y) { reverse_twice<true>(x, y); }
EXPORT(reversed_twice)
extern "C" __global__ void reversed_without_barrier(const float* x, float* y) { reverse_twice<false>(x, y); }
EXPORT(reversed_without_barrier)

// Sums of a block twice through one array: a warp that goes ahead may write its second sum before others have read the first.
template <bool SECOND> __device__ __forceinline__ void sums_twice(const float* x, float* y) {
  SHARED(float, sums, 8);
  float value = x[first_item()];
  for (int i = 0; i < 2; i++) {
    const float sum = warp_sum(value);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    value = float(threadIdx.x);
    for (int w = 0; w < 8; w++) value += sums[w];
    if (SECOND) __syncthreads();
  }
  y[first_item()] = value;
}
extern "C" __global__ void summed_twice(const float* x, float* y) { sums_twice<true>(x, y); }
EXPORT(summed_twice)
extern "C" __global__ void summed_twice_without_barrier(const float* x, float* y) { sums_twice<false>(x, y); }
EXPORT(summed_twice_without_barrier)

// Every thread takes the element of its right neighbour in place: a race between the threads of a kernel without barriers.
extern "C" __global__ void shifted_in_place(float* x, int n) {
  const int i = int(first_item());
  if (i + 1 < n) x[i] = x[i + 1];
}
EXPORT_INDEPENDENT(shifted_in_place)

extern "C" __global__ void filled(float* x, int64_t first, int64_t end) {
  for (int64_t i = first + first_item(); i < end; i += item_step()) x[i] = 1;
}
EXPORT_INDEPENDENT(filled)
extern "C" __global__ void filled_by_fibres(float* x, int64_t first, int64_t end) {
  for (int64_t i = first + first_item(); i < end; i += item_step()) x[i] = 1;
  __syncthreads();
}
EXPORT(filled_by_fibres)

extern "C" __global__ void aligned_loads(const float* x, float* y) { store(y, load<float, 4>(x)); }
EXPORT_INDEPENDENT(aligned_loads)
extern "C" __global__ void aligned_loads_of_halves(const bf16* x, float* y) {
  const Pack<bf16, 8> pack = load<bf16, 8>(x);
  float sum = 0;
  for (int i = 0; i < 8; i++) sum += value(pack.at[i]);
  y[0] = sum;
}
EXPORT_INDEPENDENT(aligned_loads_of_halves)
extern "C" __global__ void quotient(const int* x, int* y) { y[0] = x[0] / x[1]; }
EXPORT_INDEPENDENT(quotient)

extern "C" __global__ void shared_overrun(float* y, int at) {
  SHARED(float, few, 10);
  few[at] = 1;
  __syncthreads();
  y[0] = few[0];
}
EXPORT(shared_overrun)
extern "C" __global__ void shared_unwritten(float* y) {
  SHARED(float, few, 10);
  y[threadIdx.x] = few[threadIdx.x];
}
EXPORT(shared_unwritten)
extern "C" __global__ void shared_too_large(float* y) {
  SHARED(double, first, 6100);
  SHARED(float, second, 100);
  y[0] = float(first[0]) + second[0];
}
EXPORT(shared_too_large)
__device__ __forceinline__ float* shared_scratch() {
  SHARED(float, scratch, 32);
  return scratch;
}
extern "C" __global__ void shared_by_one_declaration(float* y) {  // inlined twice, but one array
  float *first = shared_scratch(), *second = shared_scratch();
  first[threadIdx.x] = threadIdx.x;
  y[threadIdx.x] = second[threadIdx.x];
}
EXPORT(shared_by_one_declaration)

extern "C" __global__ void barrier_of_some(float* y) {
  if (threadIdx.x < 32) __syncthreads();
  y[threadIdx.x] = 1;
}
EXPORT(barrier_of_some)
extern "C" __global__ void barriers_apart(float* y) {
  if (threadIdx.x < 32)
    __syncthreads();
  else
    __syncthreads();
  y[threadIdx.x] = 1;
}
EXPORT(barriers_apart)
extern "C" __global__ void barrier_against_shuffle(float* y) {
  float value = threadIdx.x;
  if (threadIdx.x == 3)
    __syncthreads();
  else
    value = __shfl_xor_sync(0xffffffffu, value, 1);
  y[threadIdx.x] = value;
}
EXPORT(barrier_against_shuffle)
extern "C" __global__ void shuffle_after_return(float* y) {
  if (threadIdx.x == 3) return;
  y[threadIdx.x] = __shfl_xor_sync(0xffffffffu, float(threadIdx.x), 1);
}
EXPORT(shuffle_after_return)
extern "C" __global__ void shuffle_from_outside(float* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0xffffu, float(threadIdx.x), 20);
}
EXPORT(shuffle_from_outside)
extern "C" __global__ void shuffle_without_itself(float* y) { y[threadIdx.x] = __shfl_sync(0xffffu, 1.0f, 0); }
EXPORT(shuffle_without_itself)
extern "C" __global__ void waits_though_independent(float* y) {
  __syncthreads();
  y[0] = 1;
}
EXPORT_INDEPENDENT(waits_though_independent)
extern "C" __global__ void shuffles_though_independent(float* y) { y[0] = warp_sum(1.0f); }
EXPORT_INDEPENDENT(shuffles_though_independent)
extern "C" __global__ void shares_though_independent(float* y) {
  SHARED(float, few, 4);
  y[0] = few[0];
}
EXPORT_INDEPENDENT(shares_though_independent)

// One of each exchange between lanes, rows of `blockDim` results.
extern "C" __global__ void exchanges(int* y) {
  const int n = blockDim.x, i = threadIdx.x, lane = i % 32;
  const unsigned all = 0xffffffffu;
  y[i] = __shfl_xor_sync(all, i, 5);
  y[n + i] = __shfl_down_sync(all, i, 3);
  y[2 * n + i] = __shfl_up_sync(all, i, 3);
  y[3 * n + i] = __shfl_sync(all, i, 7);
  y[4 * n + i] = __shfl_sync(all, i, (lane * 5) % 32);
  y[5 * n + i] = int(__ballot_sync(all, lane % 3 == 0));
  y[6 * n + i] = __any_sync(all, lane == 9) + 2 * __all_sync(all, lane < 31) + 4 * __all_sync(all, lane < 32);
  __syncwarp();
  if (lane < 16) {
    __syncwarp(0xffffu);
    y[7 * n + i] = int(__shfl_xor_sync(0xffffu, double(i), 1));
  } else {
    y[7 * n + i] = __shfl_xor_sync(0xffff0000u, i, 2);
  }
}
EXPORT(exchanges)
extern "C" __global__ void places(int* y) {
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  y[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1000 * block + thread + 1;
}
EXPORT_INDEPENDENT(places)
extern "C" __global__ void places_of_fibres(int* y) {
  __syncthreads();
  const int thread = (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  y[block * blockDim.x * blockDim.y * blockDim.z + thread] += 1000 * block + thread + 1;
}
EXPORT(places_of_fibres)

struct Pair { int first; double second; };
extern "C" __global__ void takes_all_types(
    const float* a, double* b, const bf16* c, uint8_t* d, const int64_t* e, const Pair* f, bool g, int h, uint32_t i, int64_t j,
    float k, double l, Pair m, const void* n, const bool* o) {}
EXPORT_INDEPENDENT(takes_all_types)
