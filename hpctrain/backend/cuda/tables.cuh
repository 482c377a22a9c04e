// Kernels that look at many arrays in one launch, over a table of them.
//
// A row of the table is (address, elements, first tile); one more row follows, whose first tile is the number of all tiles. An array is
// divided into tiles of TILE elements, a block's work at a time, by counting from its own start: which other arrays there are, and how many
// blocks run, changes no bit.
#include "common.cuh"

constexpr int TILE = 8192, THREADS = 256, COLUMNS = 3;

// The array that a tile belongs to: the last one that does not begin after it. Arrays without elements have no tiles.
__device__ __forceinline__ const int64_t* array_of(const int64_t* table, int32_t arrays, int64_t tile) {
  int32_t low = 0, high = arrays;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (table[middle * COLUMNS + 2] <= tile) low = middle; else high = middle;
  }
  return table + low * COLUMNS;
}
