// A network's input from stored pixels. Each image, or a part of it that is resized first, is cropped to a window, made black outside a box,
// normalised by channel, and overwritten in a second box.
#include "images.cuh"
#include "resampling.cuh"

// The remaining steps of one image, as WINDOW in pixels.py. Boxes are [above, below) x [before, after) of the result.
struct Box {
  int32_t above, below, before, after;
  __device__ __forceinline__ bool has_row(int y) const { return y >= above && y < below; }
  __device__ __forceinline__ bool has_column(int x) const { return x >= before && x < after; }
};
struct Window {
  int32_t top, left, step;
  Box shown, filled;
};

// Pixels of stored images of height x width.
struct Stored {
  const uint8_t *pixels, *line;
  int height, width, channels;
  __device__ __forceinline__ void begin_row(int image, int y) { line = pixels + (int64_t(image) * height + y) * width * channels; }
  __device__ __forceinline__ uint32_t at(int x, int c) const { return line[x * channels + c]; }
};

// Pixels of parts of such images that are resized to made_height x made_width, by the taps of each row, then of each column.
struct Resampled {
  const uint8_t* pixels;
  const Part* parts;
  const int32_t* table;
  int height, width, channels, made_height, made_width, most, interpolates;
  Resized image;
  Taps down;
  const int32_t* across;
  __device__ __forceinline__ void begin_row(int number, int y) {
    const Part part = parts[number];
    image.channels = channels, image.pitch = int64_t(width) * channels;
    image.corner = pixels + ((int64_t(number) * height + part.top) * width + part.left) * channels;
    image.down_interpolated = is_interpolated(part.height, made_height, interpolates);
    image.across_interpolated = is_interpolated(part.width, made_width, interpolates);
    const int32_t* entries = table + int64_t(number) * (made_height + made_width) * (2 + most);
    down.entry = entries + int64_t(y) * (2 + most), across = entries + int64_t(made_height) * (2 + most);
  }
  __device__ __forceinline__ uint32_t at(int x, int c) const {
    Taps taps;
    taps.entry = across + int64_t(x) * (2 + most);
    return image.pixel(down, taps, c);
  }
};

// A thread computes W adjacent elements of a row of `size` elements, columns x channels. Each product and each sum is rounded separately, as
// on the host.
template <class T, int W, class Source> __device__ __forceinline__ void make_input(
    T* out, Source source, const int32_t* windows, const typename Sum<T>::type* scale, const typename Sum<T>::type* shift,
    typename Sum<T>::type fill, int channels, int out_height, int size, int rows) {
  typedef typename Sum<T>::type S;
  for (int row = first_row(); row < rows; row += row_step()) {
    const int image = int(unsigned(row) / unsigned(out_height)), y = row - image * out_height;
    const Window window = reinterpret_cast<const Window*>(windows)[image];
    const bool row_shown = window.shown.has_row(y), row_filled = window.filled.has_row(y);
    source.begin_row(image, row_shown ? window.top + y : 0);
    for (int item = threadIdx.x * W; item < size; item += blockDim.x * W) {
      int x = int(unsigned(item) / unsigned(channels)), c = item - x * channels;
      Pack<T, W> made;
#pragma unroll
      for (int i = 0; i < W; i++) {
        const bool shown = row_shown && window.shown.has_column(x);
        const S pixel = shown ? S(source.at(window.left + window.step * x, c)) : S(0);
        const S normalised = exact_sum(exact_product(pixel, scale[c]), shift[c]);
        made.at[i] = Round<T>::of(row_filled && window.filled.has_column(x) ? fill : normalised);
        if (++c == channels) c = 0, x++;
      }
      store(out + int64_t(row) * size + item, made);
    }
  }
}

// Writes the taps of all rows, then of all columns, of each image. most: maximum number of neighbours.
extern "C" __global__ __launch_bounds__(256) void make_taps(
    int32_t* table, const int32_t* parts, int made_height, int made_width, int most, int interpolates, int64_t entries) {
  for (int64_t i = first_item(); i < entries; i += item_step()) {
    const int image = int(i / (made_height + made_width)), place = int(i - int64_t(image) * (made_height + made_width));
    const Part part = reinterpret_cast<const Part*>(parts)[image];
    const bool is_row = place < made_height;
    const int size = is_row ? part.height : part.width, made = is_row ? made_height : made_width;
    int32_t* entry = table + i * (2 + most);
    if (is_interpolated(size, made, interpolates)) write_interpolation(entry, is_row ? place : place - made_height, size, made);
    else write_filter(entry, is_row ? place : place - made_height, size, made);
  }
}
EXPORT_INDEPENDENT(make_taps)

#define MAKE(T, tag, W) \
  extern "C" __global__ __launch_bounds__(256) void make_input_##tag##_w##W( \
      T* out, const uint8_t* pixels, const int32_t* windows, const Sum<T>::type* scale, const Sum<T>::type* shift, Sum<T>::type fill, \
      int height, int width, int channels, int out_height, int size, int rows) { \
    const Stored source = {pixels, nullptr, height, width, channels}; \
    make_input<T, W>(out, source, windows, scale, shift, fill, channels, out_height, size, rows); \
  } \
  EXPORT_INDEPENDENT(make_input_##tag##_w##W)
MAKE(float, f32, 4) MAKE(float, f32, 1) MAKE(bf16, bf16, 8) MAKE(bf16, bf16, 1)

// One element per thread: adjacent threads read adjacent pixels, and arithmetic takes longer than stores.
#define MAKE_RESAMPLED(T, tag) \
  extern "C" __global__ __launch_bounds__(256) void resample_input_##tag##_w1( \
      T* out, const uint8_t* pixels, const int32_t* windows, const Sum<T>::type* scale, const Sum<T>::type* shift, Sum<T>::type fill, \
      int height, int width, int channels, int out_height, int size, int rows, const int32_t* parts, const int32_t* table, \
      int made_height, int made_width, int most, int interpolates) { \
    Resampled source; \
    source.pixels = pixels, source.parts = reinterpret_cast<const Part*>(parts), source.table = table; \
    source.height = height, source.width = width, source.channels = channels; \
    source.made_height = made_height, source.made_width = made_width, source.most = most, source.interpolates = interpolates; \
    make_input<T, 1>(out, source, windows, scale, shift, fill, channels, out_height, size, rows); \
  } \
  EXPORT_INDEPENDENT(resample_input_##tag##_w1)
MAKE_RESAMPLED(float, f32) MAKE_RESAMPLED(bf16, bf16)
#ifdef ON_CPU
MAKE(double, f64, 2) MAKE(double, f64, 1) MAKE_RESAMPLED(double, f64)
#endif
