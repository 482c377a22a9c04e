// Bilinear resizing in integer arithmetic, as in pixels.py: dimensions of an image are filtered (Pillow) or interpolated (OpenCV).
#include "exact.cuh"

constexpr int FILTER_BITS = 22, INTERPOLATION_BITS = 8;

// The part of an image that is resized.
struct Part { int32_t top, left, height, width; };

// The stored pixels from which one pixel of a dimension is computed: `count` neighbours, beginning at `first`. A table has an entry of
// 2 + most numbers for each pixel.
struct Taps {
  const int32_t* entry;
  __device__ __forceinline__ int first() const { return entry[0]; }
  __device__ __forceinline__ int count() const { return entry[1]; }
  __device__ __forceinline__ int weight(int k) const { return entry[2 + k]; }
};

__device__ __forceinline__ bool is_interpolated(int size, int made, int interpolates) { return interpolates && made > size; }

// The value of the triangle filter at pixel `at`.
__device__ __forceinline__ double triangle(int at, double centre, double step) {
  double distance = exact_product(exact_sum(exact_difference(double(at), centre), 0.5), step);
  if (distance < 0) distance = -distance;
  return distance < 1 ? exact_difference(1.0, distance) : 0.0;
}

__device__ __forceinline__ void write_filter(int32_t* entry, int index, int size, int made) {
  const double scale = exact_quotient(double(size), double(made)), support = scale > 1 ? scale : 1.0;
  const double centre = exact_product(exact_sum(double(index), 0.5), scale), step = exact_quotient(1.0, support);
  int first = int(exact_sum(exact_difference(centre, support), 0.5)), end = int(exact_sum(exact_sum(centre, support), 0.5));
  first = first < 0 ? 0 : first, end = end > size ? size : end;
  double total = 0;
  for (int at = first; at < end; at++) total = exact_sum(total, triangle(at, centre, step));
  entry[0] = first, entry[1] = end - first;
  for (int at = first; at < end; at++) {
    const double share = exact_quotient(triangle(at, centre, step), total);
    entry[2 + at - first] = int(exact_sum(0.5, exact_product(share, double(1 << FILTER_BITS))));
  }
}

__device__ __forceinline__ void write_interpolation(int32_t* entry, int index, int size, int made) {
  const double scale = exact_quotient(1.0, exact_quotient(double(made), double(size)));
  const double place = exact_difference(exact_product(scale, exact_sum(double(index), 0.5)), 0.5);
  const int before = place < 0 ? -1 : int(place);
  const bool inside = before >= 0 && before < size - 1;
  // Rounds to nearest even: the sum with 1.5 * 2^52 has no fractional digits.
  const double second = exact_product(exact_difference(place, double(before)), double(1 << INTERPOLATION_BITS)), whole = 6755399441055744.0;
  const int weight = inside ? int(exact_difference(exact_sum(second, whole), whole)) : 0;
  entry[0] = before < 0 ? 0 : before < size ? before : size - 1;
  entry[1] = inside ? 2 : 1;
  entry[2] = (1 << INTERPOLATION_BITS) - weight, entry[3] = weight;
}

// The pixels of an image's part, resized.
struct Resized {
  const uint8_t* corner;  // the first pixel of the part
  int64_t pitch;          // number of elements between two rows
  int channels;
  bool down_interpolated, across_interpolated;

  static __device__ __forceinline__ uint32_t rounded(uint32_t sum, int bits) {
    const uint32_t value = (sum + (1u << (bits - 1))) >> bits;
    return value < 255 ? value : 255;
  }
  __device__ __forceinline__ uint32_t stored(int y, int x, int c) const { return corner[y * pitch + x * channels + c]; }
  __device__ __forceinline__ uint32_t filtered_across(int y, Taps across, int c) const {
    uint32_t sum = 0;
    for (int k = 0; k < across.count(); k++) sum += across.weight(k) * stored(y, across.first() + k, c);
    return rounded(sum, FILTER_BITS);
  }
  __device__ __forceinline__ uint32_t filtered_down(Taps down, int x, int c) const {
    uint32_t sum = 0;
    for (int k = 0; k < down.count(); k++) sum += down.weight(k) * stored(down.first() + k, x, c);
    return rounded(sum, FILTER_BITS);
  }
  __device__ __forceinline__ uint32_t filtered(Taps down, Taps across, int c) const {
    uint32_t sum = 0;
    for (int k = 0; k < down.count(); k++) sum += down.weight(k) * filtered_across(down.first() + k, across, c);
    return rounded(sum, FILTER_BITS);
  }
  // Interpolation across, of rows that are filtered first.
  __device__ __forceinline__ uint32_t interpolated_across(Taps down, Taps across, int c) const {
    uint32_t sum = 0;
    for (int k = 0; k < across.count(); k++) sum += across.weight(k) * filtered_down(down, across.first() + k, c);
    return rounded(sum, INTERPOLATION_BITS);
  }
  // Interpolation down, of columns that are filtered first.
  __device__ __forceinline__ uint32_t interpolated_down(Taps down, Taps across, int c) const {
    uint32_t sum = 0;
    for (int k = 0; k < down.count(); k++) sum += down.weight(k) * filtered_across(down.first() + k, across, c);
    return rounded(sum, INTERPOLATION_BITS);
  }
  __device__ __forceinline__ uint32_t interpolated(Taps down, Taps across, int c) const {
    uint32_t sum = 0;
    for (int k = 0; k < down.count(); k++) {
      uint32_t row = 0;
      for (int j = 0; j < across.count(); j++) row += across.weight(j) * stored(down.first() + k, across.first() + j, c);
      sum += down.weight(k) * row;
    }
    return rounded(sum, 2 * INTERPOLATION_BITS);
  }
  __device__ __forceinline__ uint32_t pixel(Taps down, Taps across, int c) const {
    if (down_interpolated) return across_interpolated ? interpolated(down, across, c) : interpolated_down(down, across, c);
    return across_interpolated ? interpolated_across(down, across, c) : filtered(down, across, c);
  }
};
