// Definitions for all kernels. T is the dtype of activations: double (only on the emulated device), float or bf16. Sum<T>::type is the dtype
// of sums, parameters and statistics: double for double, otherwise float. No kernel uses atomics or depends on the order of blocks.
#ifdef ON_CPU
#include "cuda_on_cpu.h"
#else
#define SHARED(T, name, n) __shared__ T name[n]
#define EXPORT(name)
#define EXPORT_INDEPENDENT(name)
#define REQUIRE_ALIGNED(p, bytes)
#ifdef __CUDACC_RTC__  // NVRTC has no standard headers
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;
typedef int int32_t;
typedef long int64_t;
#else
#include <cstdint>
#endif
#endif

struct bf16 { uint16_t bits; };
template <class T> struct Sum { typedef float type; };
template <> struct Sum<double> { typedef double type; };

__device__ __forceinline__ double value(double x) { return x; }
__device__ __forceinline__ float value(float x) { return x; }
__device__ __forceinline__ float value(bf16 x) { return __uint_as_float(uint32_t(x.bits) << 16); }

// Rounds a sum to T, to nearest even.
template <class T> struct Round { template <class S> static __device__ __forceinline__ T of(S x) { return T(x); } };
template <> struct Round<bf16> {
  static __device__ __forceinline__ bf16 of(float x) {
    bf16 r;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r.bits) : "f"(x));
#else
    uint32_t u = __float_as_uint(x);
    r.bits = (u & 0x7fffffff) > 0x7f800000 ? 0x7fff : uint16_t((u + 0x7fff + (u >> 16 & 1)) >> 16);
#endif
    return r;
  }
};

// W adjacent elements that a thread loads and stores at once: 16 bytes, or one element.
template <class T, int W> struct alignas(W * sizeof(T)) Pack { T at[W]; };
template <class T, int W> __device__ __forceinline__ Pack<T, W> load(const T* p) {
  REQUIRE_ALIGNED(p, W * sizeof(T));
  return *reinterpret_cast<const Pack<T, W>*>(p);
}
template <class T, int W> __device__ __forceinline__ void store(T* p, const Pack<T, W>& v) {
  REQUIRE_ALIGNED(p, W * sizeof(T));
  *reinterpret_cast<Pack<T, W>*>(p) = v;
}

// The first item of this thread, and the distance to its next item, in a kernel that strides over items along x.
__device__ __forceinline__ int64_t first_item() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
__device__ __forceinline__ int64_t item_step() { return int64_t(gridDim.x) * blockDim.x; }

// The sum over a warp, with the same bits in every lane.
template <class S> __device__ __forceinline__ S warp_sum(S x) {
  for (int m = 16; m; m /= 2) x += __shfl_xor_sync(0xffffffffu, x, m);
  return x;
}

// NaN stays NaN; the gradient at 0 is 0.
template <class S> __device__ __forceinline__ S relu(S x) { return x > 0 ? x : (x == x ? S(0) : x); }
