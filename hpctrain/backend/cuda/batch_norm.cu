// Batch norm over (rows, channels), channels last (Ioffe and Szegedy, ICML 2015), then optionally the sum with a second input and a ReLU.
//
// Blocks are (packs of channels, rows). A thread's channels do not change, so the coefficients stay in registers. Sums over rows take two
// launches: in the first, the blocks of each blockIdx.y sum one part of the rows; the second adds the parts in float64. Deviations are
// taken from one row of the part, so that a large mean loses no digits. Coefficients are (7, channels), by the names below.
//
// All blocks of a sum move over the rows together, from the last row to the first. The preceding kernel has written the last rows last, and
// the next kernel reads the first rows first, so both find some of their rows in the caches.
//
// ReLU: backward recomputes the sign of the output from x. If a second input was added, it reads the bit that forward has saved.
#include "common.cuh"

#define THREADS 256
enum Coefficient { CENTRE, SCALE, OFFSET, INVERSE, CORRECTION, SLOPE, SHIFT };
enum Mask { NONE, REMADE, STORED };
enum Flag { GRADIENT = 1, ADD_GRADIENT = 2, RESIDUAL = 4, ADD_RESIDUAL = 8 };

// A fused multiply-add regardless of compiler options, so that forward and backward compute the same bits.
__device__ __forceinline__ float multiply_add(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double multiply_add(double a, double b, double c) { return fma(a, b, c); }

template <int W> __device__ __forceinline__ int first_channel() { return int(blockIdx.x * blockDim.x + threadIdx.x) * W; }

// One coefficient of W channels.
template <int W, class S> __device__ __forceinline__ Pack<S, W> pick(const S* coefficients, Coefficient which, int channels, int channel) {
  return load<S, W>(coefficients + int64_t(which) * channels + channel);
}

// Reduces two sums of W channels over the rows of a block; partial is (2, channels, gridDim.y).
template <int W, class S> __device__ __forceinline__ void sum_rows(const Pack<S, W>* sums, S* partial, int channels) {
  SHARED(S, shared, 2 * W * THREADS);
  const int wide = blockDim.x, threads = wide * blockDim.y, thread = threadIdx.y * wide + threadIdx.x;
#pragma unroll
  for (int i = 0; i < W; i++) {
    shared[i * THREADS + thread] = sums[0].at[i];
    shared[(W + i) * THREADS + thread] = sums[1].at[i];
  }
  __syncthreads();
  for (int k = thread; k < 2 * W * wide; k += threads) {
    const int which = k / wide, lane = k % wide, channel = (blockIdx.x * wide + lane) * W + which % W;
    S sum = 0;
    for (int row = 0; row < int(blockDim.y); row++) sum += shared[which * THREADS + row * wide + lane];
    if (channel < channels) partial[(int64_t(which / W) * channels + channel) * gridDim.y + blockIdx.y] = sum;
  }
}

// The first row of a part that a block reads. The part's deviations are taken from it. A part consists of groups of `high` adjacent rows.
__device__ __forceinline__ int64_t first_row(int part, int64_t high, int64_t rows) { return rows - 1 - part * high; }

// Sums of the deviations from a row of each part, and of their squares.
template <class T, int W> __device__ __forceinline__ void moments(const T* x, typename Sum<T>::type* partial, int64_t rows, int channels) {
  typedef typename Sum<T>::type S;
  Pack<S, W> sums[2] = {};
  const int channel = first_channel<W>();
  const int64_t begin = first_row(blockIdx.y, blockDim.y, rows), step = int64_t(gridDim.y) * blockDim.y;
  if (channel < channels) {
    const Pack<T, W> first = load<T, W>(x + begin * channels + channel);
#pragma unroll 4
    for (int64_t row = begin - threadIdx.y; row >= 0; row -= step) {
      const Pack<T, W> v = load<T, W>(x + row * channels + channel);
#pragma unroll
      for (int i = 0; i < W; i++) {
        const S deviation = value(v.at[i]) - value(first.at[i]);
        sums[0].at[i] += deviation;
        sums[1].at[i] = multiply_add(deviation, deviation, sums[1].at[i]);
      }
    }
  }
  sum_rows<W, S>(sums, partial, channels);
}

// y = (x - centre) * scale + offset; the offset corrects the rounding of the mean.
template <class S> __device__ __forceinline__ void normalisation(S* coefficients, int channels, int c, double mean, double inverse, S gamma, S beta) {
  const S centre = S(mean);
  const double scale = gamma * inverse;
  coefficients[int64_t(CENTRE) * channels + c] = centre;
  coefficients[int64_t(SCALE) * channels + c] = S(scale);
  coefficients[int64_t(OFFSET) * channels + c] = S(beta + (centre - mean) * scale);
}

// One warp per channel c: the mean of all rows and the sum of squared deviations, by the formula of Chan, Golub and LeVeque (1979) for
// parts. Returns true in the thread that has the results.
template <class T, class S>
__device__ __forceinline__ bool channel_moments(const S* partial, const T* x, int parts, int64_t rows, int64_t high, int channels, int c, double& mean, double& m2) {
  double total = 0, squares = 0, first = 0;
  if (c < channels && parts) {
    first = value(x[first_row(0, high, rows) * channels + c]);
    // Every part has at least `whole` rows. Of the remaining rows, the first parts have `high` each, and one part has the rest.
    const int64_t whole = rows / (parts * high) * high, left = rows - whole * parts;
#pragma unroll 4
    for (int p = threadIdx.x; p < parts; p += 32) {
      const int64_t over = left - p * high;
      const double count = double(whole + (over < 0 ? 0 : over < high ? over : high));
      const double sum = partial[int64_t(c) * parts + p], square = partial[(int64_t(channels) + c) * parts + p];
      const double mean = sum / count, distance = value(x[first_row(p, high, rows) * channels + c]) - first + mean;
      total += count * distance;
      squares += square - sum * mean + count * distance * distance;
    }
  }
  total = warp_sum(total);
  squares = warp_sum(squares);
  if (c >= channels || threadIdx.x) return false;
  const double count = double(rows > 1 ? rows : 1);
  mean = first + total / count;
  m2 = squares - total * total / count;
  m2 = m2 < 0 ? 0 : m2;
  return true;
}

// Coefficients and statistics of a channel, from the moments of `rows` rows.
template <class S>
__device__ __forceinline__ void take_moments(double mean, double m2, const S* gamma, const S* beta, S* coefficients, S* batch_mean, S* batch_var, int64_t rows, int channels, int c, double epsilon) {
  const double count = double(rows > 1 ? rows : 1), inverse = 1 / sqrt(m2 / count + epsilon);
  normalisation(coefficients, channels, c, mean, inverse, gamma[c], beta[c]);
  coefficients[int64_t(INVERSE) * channels + c] = S(inverse);
  coefficients[int64_t(CORRECTION) * channels + c] = S(S(mean) - mean);
  batch_mean[c] = S(mean);
  batch_var[c] = S(m2 / (rows > 2 ? rows - 1 : 1));
}

template <class T, class S>
__device__ __forceinline__ void moments_finish(const S* partial, const T* x, const S* gamma, const S* beta, S* coefficients, S* batch_mean, S* batch_var, int parts, int64_t rows, int64_t high, int channels, double epsilon) {
  const int c = blockIdx.x * blockDim.y + threadIdx.y;
  double mean, m2;
  if (channel_moments<T, S>(partial, x, parts, rows, high, channels, c, mean, m2))
    take_moments<S>(mean, m2, gamma, beta, coefficients, batch_mean, batch_var, rows, channels, c, epsilon);
}

// This rank's moments, (2, channels): means, and sums of squared deviations.
template <class T, class S>
__device__ __forceinline__ void moments_own(const S* partial, const T* x, double* moments, int parts, int64_t rows, int64_t high, int channels) {
  const int c = blockIdx.x * blockDim.y + threadIdx.y;
  double mean, m2;
  if (channel_moments<T, S>(partial, x, parts, rows, high, channels, c, mean, m2)) {
    moments[c] = mean;
    moments[channels + c] = m2;
  }
}

// One thread per channel: the results of moments_finish, from the moments of all ranks' rows.
template <class S>
__device__ __forceinline__ void moments_merged(const double* moments, const S* gamma, const S* beta, S* coefficients, S* batch_mean, S* batch_var, int64_t rows, int channels, double epsilon) {
  const int c = int(first_item());
  if (c < channels) take_moments<S>(moments[c], moments[channels + c], gamma, beta, coefficients, batch_mean, batch_var, rows, channels, c, epsilon);
}

// The coefficients of evaluation, and of the input's gradient if training has fixed statistics: dx = scale d.
template <class S> __device__ __forceinline__ void evaluation(const S* mean, const S* variance, const S* gamma, const S* beta, S* coefficients, int channels, double epsilon) {
  const int c = int(first_item());
  if (c >= channels) return;
  normalisation(coefficients, channels, c, mean[c], 1 / sqrt(variance[c] + epsilon), gamma[c], beta[c]);
  coefficients[int64_t(SLOPE) * channels + c] = coefficients[int64_t(SHIFT) * channels + c] = S(0);
}

// Two rows at a time, with all loads before the stores. The compiler cannot reorder these, since y may be x. mask: one byte per pack, or null.
template <class T, int W, bool add, bool rectify>
__device__ __forceinline__ void apply(const T* x, const T* residual, const typename Sum<T>::type* coefficients, T* y, uint8_t* mask, int64_t rows, int channels) {
  typedef typename Sum<T>::type S;
  const int channel = first_channel<W>();
  if (channel >= channels) return;
  const Pack<S, W> centre = pick<W>(coefficients, CENTRE, channels, channel), scale = pick<W>(coefficients, SCALE, channels, channel), offset = pick<W>(coefficients, OFFSET, channels, channel);
  const int64_t step = int64_t(gridDim.y) * blockDim.y;
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += 2 * step) {
    Pack<T, W> v[2], r[2];
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (row + k * step < rows) {
        v[k] = load<T, W>(x + (row + k * step) * channels + channel);
        if (add) r[k] = load<T, W>(residual + (row + k * step) * channels + channel);
      }
#pragma unroll
    for (int k = 0; k < 2; k++)
      if (row + k * step < rows) {
        unsigned bits = 0;
#pragma unroll
        for (int i = 0; i < W; i++) {
          S out = multiply_add(value(v[k].at[i]) - centre.at[i], scale.at[i], offset.at[i]);
          if (add) out += value(r[k].at[i]);
          v[k].at[i] = Round<T>::of(rectify ? relu(out) : out);
          bits |= unsigned(value(v[k].at[i]) > 0) << i;
        }
        store(y + (row + k * step) * channels + channel, v[k]);
        if (add && rectify && mask) mask[((row + k * step) * channels + channel) / W] = uint8_t(bits);
      }
  }
}

// One bit per channel of a pack: whether the ReLU was active.
template <class T, int W, Mask kind, class S>
__device__ __forceinline__ unsigned passes(const Pack<T, W>& x, const uint8_t* mask, int64_t at, const Pack<S, W>& centre, const Pack<S, W>& scale, const Pack<S, W>& offset) {
  if (kind == STORED) return mask[at / W];
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < W; i++)
    bits |= unsigned(kind == NONE || value(Round<T>::of(multiply_add(value(x.at[i]) - centre.at[i], scale.at[i], offset.at[i]))) > 0) << i;
  return bits;
}

// Sums of d (x - centre) and of d, where d is dy with zeros where the ReLU was inactive.
template <class T, int W, Mask kind>
__device__ __forceinline__ void backward_sums(const T* x, const T* dy, const uint8_t* mask, const typename Sum<T>::type* coefficients, typename Sum<T>::type* partial, int64_t rows, int channels) {
  typedef typename Sum<T>::type S;
  Pack<S, W> sums[2] = {};
  const int channel = first_channel<W>();
  const int64_t begin = first_row(blockIdx.y, blockDim.y, rows), step = int64_t(gridDim.y) * blockDim.y;
  if (channel < channels) {
    const Pack<S, W> centre = pick<W>(coefficients, CENTRE, channels, channel);
    Pack<S, W> scale, offset;
    if (kind == REMADE) scale = pick<W>(coefficients, SCALE, channels, channel), offset = pick<W>(coefficients, OFFSET, channels, channel);
#pragma unroll 2
    for (int64_t row = begin - threadIdx.y; row >= 0; row -= step) {
      const int64_t at = row * channels + channel;
      const Pack<T, W> v = load<T, W>(x + at), d = load<T, W>(dy + at);
      const unsigned bits = passes<T, W, kind>(v, mask, at, centre, scale, offset);
#pragma unroll
      for (int i = 0; i < W; i++) {
        const S passed = bits >> i & 1 ? value(d.at[i]) : S(0);
        sums[0].at[i] = multiply_add(passed, value(v.at[i]) - centre.at[i], sums[0].at[i]);
        sums[1].at[i] += passed;
      }
    }
  }
  sum_rows<W, S>(sums, partial, channels);
}

// One warp per channel c: gradients of gamma and beta. Returns true in the thread that has them.
template <class S> __device__ __forceinline__ bool channel_gradients(const S* partial, const S* coefficients, S* d_gamma, S* d_beta, int parts, int channels, int c, double& gamma, double& sum) {
  double products = 0;
  sum = 0;
  if (c < channels)
#pragma unroll 8
    for (int p = threadIdx.x; p < parts; p += 32) {
      products += partial[int64_t(c) * parts + p];
      sum += partial[(int64_t(channels) + c) * parts + p];
    }
  products = warp_sum(products);
  sum = warp_sum(sum);
  if (c >= channels || threadIdx.x) return false;
  gamma = (products + coefficients[int64_t(CORRECTION) * channels + c] * sum) * coefficients[int64_t(INVERSE) * channels + c];
  d_gamma[c] = S(gamma);
  d_beta[c] = S(sum);
  return true;
}

// The coefficients of the input's gradient, from the gradients of gamma and beta over `rows` rows.
template <class S> __device__ __forceinline__ void take_gradients(double gamma, double sum, S* coefficients, int64_t rows, int channels, int c) {
  const double inverse = coefficients[int64_t(INVERSE) * channels + c], correction = coefficients[int64_t(CORRECTION) * channels + c];
  const double scale = coefficients[int64_t(SCALE) * channels + c];
  const double count = double(rows > 1 ? rows : 1), slope = scale * inverse * gamma / count;
  coefficients[int64_t(SLOPE) * channels + c] = S(slope);
  coefficients[int64_t(SHIFT) * channels + c] = S(scale * sum / count + correction * slope);
}

template <class S> __device__ __forceinline__ void backward_finish(const S* partial, S* coefficients, S* d_gamma, S* d_beta, int parts, int64_t rows, int channels) {
  const int c = blockIdx.x * blockDim.y + threadIdx.y;
  double gamma, sum;
  if (channel_gradients<S>(partial, coefficients, d_gamma, d_beta, parts, channels, c, gamma, sum))
    take_gradients<S>(gamma, sum, coefficients, rows, channels, c);
}

// This rank's gradients of gamma and beta, also as (2, channels) in float64.
template <class S> __device__ __forceinline__ void backward_own(const S* partial, const S* coefficients, S* d_gamma, S* d_beta, double* sums, int parts, int channels) {
  const int c = blockIdx.x * blockDim.y + threadIdx.y;
  double gamma, sum;
  if (channel_gradients<S>(partial, coefficients, d_gamma, d_beta, parts, channels, c, gamma, sum)) {
    sums[c] = gamma;
    sums[channels + c] = sum;
  }
}

// One thread per channel: the coefficients of backward_finish, from all ranks' sums.
template <class S> __device__ __forceinline__ void backward_merged(const double* sums, S* coefficients, int64_t rows, int channels) {
  const int c = int(first_item());
  if (c < channels) take_gradients<S>(sums[c], sums[channels + c], coefficients, rows, channels, c);
}

// dx = scale d - (x - centre) slope - shift; the gradient of the second input is d. dx or d_residual may be dy.
template <class T, int W, Mask kind>
__device__ __forceinline__ void backward_input(const T* x, const T* dy, const uint8_t* mask, const typename Sum<T>::type* coefficients, T* dx, T* d_residual, int flags, int64_t rows, int channels) {
  typedef typename Sum<T>::type S;
  const int channel = first_channel<W>();
  if (channel >= channels) return;
  const Pack<S, W> centre = pick<W>(coefficients, CENTRE, channels, channel), scale = pick<W>(coefficients, SCALE, channels, channel);
  const Pack<S, W> slope = pick<W>(coefficients, SLOPE, channels, channel), shift = pick<W>(coefficients, SHIFT, channels, channel);
  Pack<S, W> offset;
  if (kind == REMADE) {  // there is no second input
    offset = pick<W>(coefficients, OFFSET, channels, channel);
    flags &= GRADIENT | ADD_GRADIENT;
  }
  for (int64_t row = int64_t(blockIdx.y) * blockDim.y + threadIdx.y; row < rows; row += int64_t(gridDim.y) * blockDim.y) {
    const int64_t at = row * channels + channel;
    const Pack<T, W> v = load<T, W>(x + at), d = load<T, W>(dy + at);
    Pack<T, W> out, residual;
    if (flags & ADD_GRADIENT) out = load<T, W>(dx + at);
    if (flags & ADD_RESIDUAL) residual = load<T, W>(d_residual + at);
    const unsigned bits = passes<T, W, kind>(v, mask, at, centre, scale, offset);
#pragma unroll
    for (int i = 0; i < W; i++) {
      const S passed = bits >> i & 1 ? value(d.at[i]) : S(0);
      const S gradient = multiply_add(scale.at[i], passed, -multiply_add(value(v.at[i]) - centre.at[i], slope.at[i], shift.at[i]));
      out.at[i] = Round<T>::of(flags & ADD_GRADIENT ? gradient + value(out.at[i]) : gradient);
      residual.at[i] = Round<T>::of(flags & ADD_RESIDUAL ? passed + value(residual.at[i]) : passed);
    }
    if (flags & RESIDUAL) store(d_residual + at, residual);
    if (flags & GRADIENT) store(dx + at, out);
  }
}

#define MAKE_APPLY(T, S, tag, W, name, add, rectify) \
  extern "C" __global__ void __launch_bounds__(THREADS) name##_##tag##_w##W(const T* x, const T* residual, const S* coefficients, T* y, uint8_t* mask, int64_t rows, int channels) { \
    apply<T, W, add, rectify>(x, residual, coefficients, y, mask, rows, channels); } \
  EXPORT_INDEPENDENT(name##_##tag##_w##W)
#define MAKE_BACKWARD(T, S, tag, W, suffix, kind) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_backward_sums##suffix##_##tag##_w##W(const T* x, const T* dy, const uint8_t* mask, const S* coefficients, S* partial, int64_t rows, int channels) { \
    backward_sums<T, W, kind>(x, dy, mask, coefficients, partial, rows, channels); } \
  EXPORT(bn_backward_sums##suffix##_##tag##_w##W) \
  extern "C" __global__ void __launch_bounds__(THREADS, 3) bn_backward_input##suffix##_##tag##_w##W(const T* x, const T* dy, const uint8_t* mask, const S* coefficients, T* dx, T* d_residual, int flags, int64_t rows, int channels) { \
    backward_input<T, W, kind>(x, dy, mask, coefficients, dx, d_residual, flags, rows, channels); } \
  EXPORT_INDEPENDENT(bn_backward_input##suffix##_##tag##_w##W)
#define MAKE(T, S, tag, W) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_moments_##tag##_w##W(const T* x, S* partial, int64_t rows, int channels) { \
    moments<T, W>(x, partial, rows, channels); } \
  EXPORT(bn_moments_##tag##_w##W) \
  MAKE_APPLY(T, S, tag, W, bn_apply, false, false) \
  MAKE_APPLY(T, S, tag, W, bn_apply_relu, false, true) \
  MAKE_APPLY(T, S, tag, W, bn_apply_add, true, false) \
  MAKE_APPLY(T, S, tag, W, bn_apply_add_relu, true, true) \
  MAKE_BACKWARD(T, S, tag, W, , NONE) \
  MAKE_BACKWARD(T, S, tag, W, _relu, REMADE) \
  MAKE_BACKWARD(T, S, tag, W, _mask, STORED)
#define MAKE_STATISTICS(T, S, tag) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_moments_finish_##tag(const S* partial, const T* x, const S* gamma, const S* beta, S* coefficients, S* batch_mean, S* batch_var, int parts, int64_t rows, int64_t high, int channels, double epsilon) { \
    moments_finish<T, S>(partial, x, gamma, beta, coefficients, batch_mean, batch_var, parts, rows, high, channels, epsilon); } \
  EXPORT(bn_moments_finish_##tag) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_evaluation_##tag(const S* mean, const S* variance, const S* gamma, const S* beta, S* coefficients, int channels, double epsilon) { \
    evaluation<S>(mean, variance, gamma, beta, coefficients, channels, epsilon); } \
  EXPORT_INDEPENDENT(bn_evaluation_##tag) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_backward_finish_##tag(const S* partial, S* coefficients, S* d_gamma, S* d_beta, int parts, int64_t rows, int channels) { \
    backward_finish<S>(partial, coefficients, d_gamma, d_beta, parts, rows, channels); } \
  EXPORT(bn_backward_finish_##tag) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_moments_own_##tag(const S* partial, const T* x, double* moments, int parts, int64_t rows, int64_t high, int channels) { \
    moments_own<T, S>(partial, x, moments, parts, rows, high, channels); } \
  EXPORT(bn_moments_own_##tag) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_moments_merged_##tag(const double* moments, const S* gamma, const S* beta, S* coefficients, S* batch_mean, S* batch_var, int64_t rows, int channels, double epsilon) { \
    moments_merged<S>(moments, gamma, beta, coefficients, batch_mean, batch_var, rows, channels, epsilon); } \
  EXPORT_INDEPENDENT(bn_moments_merged_##tag) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_backward_own_##tag(const S* partial, const S* coefficients, S* d_gamma, S* d_beta, double* sums, int parts, int channels) { \
    backward_own<S>(partial, coefficients, d_gamma, d_beta, sums, parts, channels); } \
  EXPORT(bn_backward_own_##tag) \
  extern "C" __global__ void __launch_bounds__(THREADS) bn_backward_merged_##tag(const double* sums, S* coefficients, int64_t rows, int channels) { \
    backward_merged<S>(sums, coefficients, rows, channels); } \
  EXPORT_INDEPENDENT(bn_backward_merged_##tag)
MAKE(float, float, f32, 4) MAKE(float, float, f32, 1) MAKE_STATISTICS(float, float, f32)
MAKE(bf16, float, bf16, 8) MAKE(bf16, float, bf16, 1) MAKE_STATISTICS(bf16, float, bf16)
#ifdef ON_CPU
MAKE(double, double, f64, 2) MAKE(double, double, f64, 1) MAKE_STATISTICS(double, double, f64)
#endif
