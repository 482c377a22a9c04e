// Adaptive average pooling over (N, H, W, C): output i of a dim of `outputs` is the mean over [floor(i size / outputs),
// ceil((i + 1) size / outputs)). Global pooling has one output. An image without pixels averages to 0.
#include "images.cuh"

// The host checks that products of the two are below 2^31.
struct Dim {
  int size, outputs;
  __device__ __forceinline__ int start(int i) const { return quotient(i * size, outputs); }
  __device__ __forceinline__ int stop(int i) const { return quotient((i + 1) * size + outputs - 1, outputs); }
  __device__ __forceinline__ int count(int i) const { const int n = stop(i) - start(i); return n > 0 ? n : 1; }
  // Outputs [first, last) contain a position.
  __device__ __forceinline__ int first(int at) const { return quotient(at * outputs, size); }
  __device__ __forceinline__ int last(int at) const { return quotient((at + 1) * outputs + size - 1, size); }
};

// For small windows: one thread per pack of outputs.
template <class T, int W>
__device__ __forceinline__ void forward(const T* __restrict__ x, T* __restrict__ y, Dim h, Dim w, int packs, int rows) {
  typedef typename Sum<T>::type S;
  const int channels = packs * W;
  for (int row = first_row(); row < rows; row += row_step()) {
    const int image = row / h.outputs, o = row - image * h.outputs, top = h.start(o), bottom = h.stop(o), lines = h.count(o);
    for (int item = threadIdx.x; item < w.outputs * packs; item += blockDim.x) {
      const Place<W> place(item, packs);
      const int left = w.start(place.column), right = w.stop(place.column);
      S sum[W];
#pragma unroll
      for (int i = 0; i < W; i++) sum[i] = 0;
      for (int line = top; line < bottom; line++)
        for (int column = left; column < right; column++) {
          const Pack<T, W> v = load<T, W>(x + ((int64_t(image) * h.size + line) * w.size + column) * channels + place.channel);
#pragma unroll
          for (int i = 0; i < W; i++) sum[i] += value(v.at[i]);
        }
      const S divisor = S(lines) * S(w.count(place.column));
      Pack<T, W> out;
#pragma unroll
      for (int i = 0; i < W; i++) out.at[i] = Round<T>::of(sum[i] / divisor);
      store(y + int64_t(row) * w.outputs * channels + int64_t(item) * W, out);
    }
  }
}

// For large windows: one block per output of 32 packs, whose 8 rows of threads divide the window's pixels. Grid (tiles of 32
// packs, outputs).
template <class T, int W>
__device__ __forceinline__ void forward_shared(const T* __restrict__ x, T* __restrict__ y, Dim h, Dim w, int packs, int outputs) {
  typedef typename Sum<T>::type S;
  constexpr int V = W * sizeof(S) > 16 ? 16 / sizeof(S) : W;
  const int channels = packs * W, lane = threadIdx.x, part = threadIdx.y, tile = blockIdx.x * 32, pack = tile + lane;
  const int64_t number = lane + 32 * part;
  SHARED(S, partial, 8 * 32 * W);
  for (int output = blockIdx.y; output < outputs; output += gridDim.y) {
    const int row = output / w.outputs, column = output - row * w.outputs, image = row / h.outputs, o = row - image * h.outputs;
    const int top = h.start(o), left = w.start(column), width = w.stop(column) - left, pixels = (h.stop(o) - top) * width;
    const T* from = x + ((int64_t(image) * h.size + top) * w.size + left) * channels + int64_t(pack) * W;
    S sum[W];
#pragma unroll
    for (int i = 0; i < W; i++) sum[i] = 0;
    if (pack < packs) {
#pragma unroll 4
      for (int pixel = part; pixel < pixels; pixel += 8) {
        const int line = width == w.size ? 0 : pixel / width;  // a window as wide as the image is contiguous
        const Pack<T, W> v = load<T, W>(from + (int64_t(line) * w.size + (pixel - line * width)) * channels);
#pragma unroll
        for (int i = 0; i < W; i++) sum[i] += value(v.at[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < W; i += V) {
      Pack<S, V> piece;
#pragma unroll
      for (int j = 0; j < V; j++) piece.at[j] = sum[i + j];
      store(partial + number * W + i, piece);
    }
    __syncthreads();
    const S divisor = S(h.count(o)) * S(w.count(column));
    for (int k = int(number); k < 32 * W && tile * W + k < channels; k += 256) {
      S total = 0;
#pragma unroll
      for (int j = 0; j < 8; j++) total += partial[j * 32 * W + k];
      y[int64_t(output) * channels + tile * W + k] = Round<T>::of(total / divisor);
    }
    __syncthreads();
  }
}

// Each element of dx sums over the outputs that contain it.
template <class T, int W>
__device__ __forceinline__ void backward(
    const T* __restrict__ dy, T* __restrict__ dx, Dim h, Dim w, int packs, int rows, int accumulate) {
  typedef typename Sum<T>::type S;
  const int channels = packs * W;
  for (int row = first_row(); row < rows; row += row_step()) {
    const int image = row / h.size, line = row - image * h.size, top = h.first(line), bottom = h.last(line);
    for (int item = threadIdx.x; item < w.size * packs; item += blockDim.x) {
      const Place<W> place(item, packs);
      const int left = w.first(place.column), right = w.last(place.column);
      S sum[W];
#pragma unroll
      for (int i = 0; i < W; i++) sum[i] = 0;
      for (int o = top; o < bottom; o++) {
        const T* from = dy + (int64_t(image) * h.outputs + o) * w.outputs * channels + place.channel;
        const S lines = S(h.count(o));
#pragma unroll 1
        for (int p = left; p < right; p++) {
          const Pack<T, W> d = load<T, W>(from + int64_t(p) * channels);
          const S share = S(1) / (lines * S(w.count(p)));
#pragma unroll
          for (int i = 0; i < W; i++) sum[i] += value(d.at[i]) * share;
        }
      }
      write_gradient<T, W>(dx + int64_t(row) * w.size * channels + int64_t(item) * W, sum, accumulate);
    }
  }
}

#define SIZES int h_size, int h_outputs, int w_size, int w_outputs, int packs, int rows
#define SIZES_OF Dim{h_size, h_outputs}, Dim{w_size, w_outputs}, packs, rows
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256, 4) name
#define MAKE(T, tag, W) \
  KERNEL(adaptive_pool_##tag##_w##W)(const T* x, T* y, SIZES) { forward<T, W>(x, y, SIZES_OF); } \
  KERNEL(adaptive_pool_shared_##tag##_w##W)(const T* x, T* y, SIZES) { forward_shared<T, W>(x, y, SIZES_OF); } \
  KERNEL(adaptive_pool_backward_##tag##_w##W)(const T* dy, T* dx, SIZES, int accumulate) { \
    backward<T, W>(dy, dx, SIZES_OF, accumulate); \
  } \
  EXPORT_INDEPENDENT(adaptive_pool_##tag##_w##W) EXPORT(adaptive_pool_shared_##tag##_w##W) \
  EXPORT_INDEPENDENT(adaptive_pool_backward_##tag##_w##W)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1)
#endif
