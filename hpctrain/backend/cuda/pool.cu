// Max and average pooling over (N, H, W, C). Backward gathers: each element of dx reads the windows that contain it, in ascending order
// of rows, then of columns. Sums therefore have one order, and no two threads write to the same address.
#include "images.cuh"

// One dim of a window over an image: output o reads position o * stride - before + tap * dilation through each tap.
struct Dim {
  int size, outputs, taps, stride, before, dilation, low, high;  // taps at [low, high) count for an average's divisor

  __device__ __forceinline__ int position(int o, int tap) const { return o * stride - before + tap * dilation; }
  __device__ __forceinline__ bool inside(int at) const { return unsigned(at) < unsigned(size); }
  // Outputs [first, last] may contain a position. `tap_of` returns the tap through which they do, or -1.
  __device__ __forceinline__ int first(int at) const {
    const int past = at + before - (taps - 1) * dilation - 1;
    return past < 0 ? 0 : quotient(past, stride) + 1;
  }
  __device__ __forceinline__ int last(int at) const {
    const int o = quotient(at + before, stride);
    return o < outputs ? o : outputs - 1;
  }
  __device__ __forceinline__ int tap_of(int at, int o) const {
    const int distance = at + before - o * stride, tap = quotient(distance, dilation);
    return tap * dilation == distance ? tap : -1;
  }
  // The number of taps of output o that count, at least 1.
  __device__ __forceinline__ int count(int o) const {
    const int start = position(o, 0);
    const int begin = start < low ? quotient(low - start + dilation - 1, dilation) : 0;
    const int room = start < high ? quotient(high - start + dilation - 1, dilation) : 0, end = room < taps ? room : taps;
    return end > begin ? end - begin : 1;
  }
};

#define DIM(d) \
  int d##_size, int d##_outputs, int d##_taps, int d##_stride, int d##_before, int d##_dilation, int d##_low, int d##_high
#define DIM_OF(d) Dim{d##_size, d##_outputs, d##_taps, d##_stride, d##_before, d##_dilation, d##_low, d##_high}

// The maximum of each window. Taps are compared from last to first, so that "greater or equal" selects the first maximum. Positions outside
// the image count as -infinity. NaN stays the maximum; the winner is then the tap that was the winner before it.
// winner: the number of the tap in row-major order, saved for backward if Tap is smaller than int. TAPS: number of the window's columns; 0
// if it is known only at the launch.
template <class T, int W, class Tap, int TAPS>
__device__ __forceinline__ void max_forward(
    const T* __restrict__ x, T* __restrict__ y, Tap* __restrict__ winners, Dim h, Dim w, int packs, int rows) {
  typedef typename Sum<T>::type S;
  const int channels = packs * W, taps = TAPS ? TAPS : w.taps;
  for (int row = first_row(); row < rows; row += row_step()) {
    const int image = row / h.outputs, o = row - image * h.outputs;
    for (int item = threadIdx.x; item < w.outputs * packs; item += blockDim.x) {
      const Place<W> place(item, packs);
      S best[W];
      int winner[W];
#pragma unroll
      for (int i = 0; i < W; i++) { best[i] = S(__uint_as_float(0xff800000u)); winner[i] = h.taps * taps - 1; }
      for (int r = h.taps - 1; r >= 0; r--) {
        const int line = h.position(o, r);
        const T* from = x + (int64_t(image) * h.size + line) * w.size * channels + place.channel;
#pragma unroll(TAPS ? TAPS : 1)
        for (int s = taps - 1; s >= 0; s--) {
          const int column = w.position(place.column, s);
          const bool inside = h.inside(line) && w.inside(column);
          Pack<T, W> v;
          if (inside) v = load<T, W>(from + int64_t(column) * channels);
#pragma unroll
          for (int i = 0; i < W; i++) {
            const S q = inside ? S(value(v.at[i])) : S(__uint_as_float(0xff800000u));
            const bool wins = q >= best[i];
            winner[i] = wins ? r * taps + s : winner[i];
            best[i] = wins || q != q ? q : best[i];
          }
        }
      }
      const int64_t at = int64_t(row) * w.outputs * channels + int64_t(item) * W;
      Pack<T, W> out;
#pragma unroll
      for (int i = 0; i < W; i++) out.at[i] = Round<T>::of(best[i]);
      store(y + at, out);
      if constexpr (sizeof(Tap) < sizeof(int)) {
        Pack<Tap, W> code;
#pragma unroll
        for (int i = 0; i < W; i++) code.at[i] = Tap(winner[i]);
        store(winners + at, code);
      }
    }
  }
}

// The mean of each window.
template <class T, int W>
__device__ __forceinline__ void average_forward(const T* __restrict__ x, T* __restrict__ y, Dim h, Dim w, int packs, int rows) {
  typedef typename Sum<T>::type S;
  const int channels = packs * W;
  for (int row = first_row(); row < rows; row += row_step()) {
    const int image = row / h.outputs, o = row - image * h.outputs, lines = h.count(o);
    for (int item = threadIdx.x; item < w.outputs * packs; item += blockDim.x) {
      const Place<W> place(item, packs);
      S sum[W];
#pragma unroll
      for (int i = 0; i < W; i++) sum[i] = 0;
      for (int r = 0; r < h.taps; r++) {
        const int line = h.position(o, r);
        if (!h.inside(line)) continue;
        const T* from = x + (int64_t(image) * h.size + line) * w.size * channels + place.channel;
#pragma unroll 1
        for (int s = 0; s < w.taps; s++) {
          const int column = w.position(place.column, s);
          if (!w.inside(column)) continue;
          const Pack<T, W> v = load<T, W>(from + int64_t(column) * channels);
#pragma unroll
          for (int i = 0; i < W; i++) sum[i] += value(v.at[i]);
        }
      }
      const S divisor = S(lines) * S(w.count(place.column));
      Pack<T, W> out;
#pragma unroll
      for (int i = 0; i < W; i++) out.at[i] = Round<T>::of(sum[i] / divisor);
      store(y + int64_t(row) * w.outputs * channels + int64_t(item) * W, out);
    }
  }
}

// dx from the windows that contain it: in max pooling, the windows that it won; in average pooling (Tap is int), each over its divisor.
template <class T, int W, class Tap>
__device__ __forceinline__ void backward(
    const T* __restrict__ dy, T* __restrict__ dx, const Tap* __restrict__ winners,
    Dim h, Dim w, int packs, int rows, int accumulate) {
  typedef typename Sum<T>::type S;
  constexpr bool largest = sizeof(Tap) < sizeof(int);
  const int channels = packs * W;
  for (int row = first_row(); row < rows; row += row_step()) {
    const int image = row / h.size, line = row - image * h.size, first = h.first(line), last = h.last(line);
    for (int item = threadIdx.x; item < w.size * packs; item += blockDim.x) {
      const Place<W> place(item, packs);
      S sum[W];
#pragma unroll
      for (int i = 0; i < W; i++) sum[i] = 0;
      for (int o = first; o <= last; o++) {
        const int r = h.tap_of(line, o), lines = largest ? 1 : h.count(o), end = w.last(place.column);
        if (r < 0) continue;
#pragma unroll 1
        for (int p = w.first(place.column); p <= end; p++) {
          const int s = w.tap_of(place.column, p);
          if (s < 0) continue;
          const int64_t at = ((int64_t(image) * h.outputs + o) * w.outputs + p) * channels + place.channel;
          const Pack<T, W> d = load<T, W>(dy + at);
          if constexpr (largest) {
            const Pack<Tap, W> winner = load<Tap, W>(winners + at);
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += winner.at[i] == r * w.taps + s ? S(value(d.at[i])) : S(0);
          } else {
            const S share = S(1) / (S(lines) * S(w.count(p)));
#pragma unroll
            for (int i = 0; i < W; i++) sum[i] += value(d.at[i]) * share;
          }
        }
      }
      write_gradient<T, W>(dx + int64_t(row) * w.size * channels + int64_t(item) * W, sum, accumulate);
    }
  }
}

#define WINDOW DIM(h), DIM(w), int packs, int rows
#define WINDOW_OF DIM_OF(h), DIM_OF(w), packs, rows
#define KERNEL(name) extern "C" __global__ void __launch_bounds__(256, 4) name
#define MAKE_SAVING(T, tag, W, TAPS, Tap, code) \
  KERNEL(max_pool_##code##_##tag##_w##W)(const T* x, T* y, Tap* winners, WINDOW) { \
    max_forward<T, W, Tap, TAPS>(x, y, winners, WINDOW_OF); \
  } \
  EXPORT_INDEPENDENT(max_pool_##code##_##tag##_w##W)
#define MAKE_BACKWARD(T, tag, W, Tap, code) \
  KERNEL(max_pool_backward_##code##_##tag##_w##W)(const T* dy, T* dx, const Tap* winners, WINDOW, int accumulate) { \
    backward<T, W>(dy, dx, winners, WINDOW_OF, accumulate); \
  } \
  EXPORT_INDEPENDENT(max_pool_backward_##code##_##tag##_w##W)
#define MAKE(T, tag, W) \
  KERNEL(max_pool_##tag##_w##W)(const T* x, T* y, WINDOW) { max_forward<T, W, int, 0>(x, y, nullptr, WINDOW_OF); } \
  KERNEL(average_pool_##tag##_w##W)(const T* x, T* y, WINDOW) { average_forward<T, W>(x, y, WINDOW_OF); } \
  KERNEL(average_pool_backward_##tag##_w##W)(const T* dy, T* dx, WINDOW, int accumulate) { \
    backward<T, W, int>(dy, dx, nullptr, WINDOW_OF, accumulate); \
  } \
  EXPORT_INDEPENDENT(max_pool_##tag##_w##W) EXPORT_INDEPENDENT(average_pool_##tag##_w##W) \
  EXPORT_INDEPENDENT(average_pool_backward_##tag##_w##W) \
  MAKE_SAVING(T, tag, W, 0, uint8_t, u8) MAKE_BACKWARD(T, tag, W, uint8_t, u8)
// Windows of many taps are rare, so one element at a time suffices. Windows of 2 and 3 columns are common, and have special kernels.
#define MAKE_ALL(T, tag, W) \
  MAKE(T, tag, 1) MAKE_SAVING(T, tag, 1, 0, uint16_t, u16) MAKE_BACKWARD(T, tag, 1, uint16_t, u16) \
  MAKE(T, tag, W) MAKE_SAVING(T, tag, W, 2, uint8_t, columns2_u8) MAKE_SAVING(T, tag, W, 3, uint8_t, columns3_u8)
MAKE_ALL(float, f32, 4) MAKE_ALL(bf16, bf16, 8)
#ifdef ON_CPU
MAKE_ALL(double, f64, 2)
#endif
