// A network's input made of stored pixels: of each image a window, black outside of a box, normalised by channel, and one box filled.
#include "exact.cuh"
#include "images.cuh"

// What is left to do to one image, as WINDOW of pixel_batch.py has it: boxes are [above, below) x [before, behind) of the result.
struct Box {
  int32_t above, below, before, behind;
  __device__ __forceinline__ bool has_row(int y) const { return y >= above && y < below; }
  __device__ __forceinline__ bool has_column(int x) const { return x >= before && x < behind; }
};
struct Window {
  int32_t top, left, step;
  Box shown, filled;
};

// A thread makes W neighbouring elements of a row of `size` elements, columns x channels; stored images are height x width. Each product
// and sum is rounded by itself, as on the host.
template <class T, int W> __device__ __forceinline__ void make_input(
    T* out, const uint8_t* pixels, const int32_t* windows, const typename Sum<T>::type* scale, const typename Sum<T>::type* shift,
    typename Sum<T>::type fill, int height, int width, int channels, int out_height, int size, int rows) {
  typedef typename Sum<T>::type S;
  for (int row = first_row(); row < rows; row += row_step()) {
    const int image = int(unsigned(row) / unsigned(out_height)), y = row - image * out_height;
    const Window window = reinterpret_cast<const Window*>(windows)[image];
    const bool row_shown = window.shown.has_row(y), row_filled = window.filled.has_row(y);
    const uint8_t* line = pixels + (int64_t(image) * height + (row_shown ? window.top + y : 0)) * width * channels;
    for (int item = threadIdx.x * W; item < size; item += blockDim.x * W) {
      int x = int(unsigned(item) / unsigned(channels)), c = item - x * channels;
      Pack<T, W> made;
#pragma unroll
      for (int i = 0; i < W; i++) {
        const bool shown = row_shown && window.shown.has_column(x);
        const S pixel = shown ? S(line[(window.left + window.step * x) * channels + c]) : S(0);
        const S normalised = exact_sum(exact_product(pixel, scale[c]), shift[c]);
        made.at[i] = Round<T>::of(row_filled && window.filled.has_column(x) ? fill : normalised);
        if (++c == channels) c = 0, x++;
      }
      store(out + int64_t(row) * size + item, made);
    }
  }
}

#define MAKE(T, tag, W) \
  extern "C" __global__ __launch_bounds__(256) void make_input_##tag##_w##W( \
      T* out, const uint8_t* pixels, const int32_t* windows, const Sum<T>::type* scale, const Sum<T>::type* shift, Sum<T>::type fill, \
      int height, int width, int channels, int out_height, int size, int rows) { \
    make_input<T, W>(out, pixels, windows, scale, shift, fill, height, width, channels, out_height, size, rows); \
  } \
  EXPORT_INDEPENDENT(make_input_##tag##_w##W)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1)
#endif
