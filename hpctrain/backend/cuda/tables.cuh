// Kernels that process many arrays in one launch, over a table of the arrays.
//
// A row of the table is (address, number of elements, first tile). In an additional last row, the first tile is the total number of tiles.
// A block processes one tile at a time. The tiles of TILE elements are counted from the array's own start, so the bits depend neither on the
// table's other arrays nor on the number of blocks.
#include "common.cuh"

constexpr int TILE = 8192, THREADS = 256, COLUMNS = 3;

// The array of a tile: the last one whose first tile is not larger. Arrays without elements have no tiles.
__device__ __forceinline__ const int64_t* array_of(const int64_t* table, int32_t arrays, int64_t tile) {
  int32_t low = 0, high = arrays;
  while (high - low > 1) {
    const int32_t middle = (low + high) / 2;
    if (table[middle * COLUMNS + 2] <= tile) low = middle; else high = middle;
  }
  return table + low * COLUMNS;
}
