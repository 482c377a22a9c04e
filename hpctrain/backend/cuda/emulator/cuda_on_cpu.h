// Runs CUDA C kernels on a CPU, one block at a time; every thread of a block is a fibre.
#pragma once
#include <cstdint>
#include <cstddef>
#include <cstring>
#include <cmath>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <random>
#include <utility>
#include <ucontext.h>
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
struct dim3_ { unsigned x = 1, y = 1, z = 1; };
struct alignas(8)  uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8)  float2 { float x, y; };
namespace cpu {
enum State { RUN, BLOCK_BARRIER, WARP_BARRIER, DONE };
struct Fibre { ucontext_t context; State state; dim3_ thread; unsigned number, shared_used; };
struct Machine {
  dim3_ grid, block, place; std::vector<Fibre> fibres; std::vector<char> stacks, shared; ucontext_t main; Fibre* now = nullptr;
  std::vector<double> lanes; std::mt19937 random; unsigned error = 0; unsigned long barriers = 0;
};
inline Machine& m() { static Machine machine; return machine; }
inline void yield(State s) { Machine& k = m(); Fibre* f = k.now; f->state = s; swapcontext(&f->context, &k.main); }
template <class T> T* shared(size_t n) {  // every thread asks in the same order and gets the same place
  Fibre* f = m().now; unsigned at = (f->shared_used + 15) / 16 * 16; f->shared_used = at + n * sizeof(T);
  if (f->shared_used > m().shared.size()) { m().error = 1; abort(); }
  return reinterpret_cast<T*>(m().shared.data() + at);
}
}  // namespace cpu
#define threadIdx (cpu::m().now->thread)
#define blockIdx (cpu::m().place)
#define blockDim (cpu::m().block)
#define gridDim (cpu::m().grid)
#define __syncthreads() cpu::yield(cpu::BLOCK_BARRIER)
#define SHARED(T, name, n) T* name = cpu::shared<T>(n)
template <class T> inline T shfl_xor(T value, int mask) {
  auto& k = cpu::m(); unsigned id = k.now->number; std::memcpy(&k.lanes[id], &value, sizeof(T)); cpu::yield(cpu::WARP_BARRIER);
  T other; std::memcpy(&other, &k.lanes[id ^ mask], sizeof(T)); cpu::yield(cpu::WARP_BARRIER); return other;
}
#define __shfl_xor_sync(all, value, mask) shfl_xor(value, mask)
template <class T> inline T atomicAdd(T* p, T v) { T old = *p; *p += v; return old; }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline unsigned __float_as_uint(float x) { unsigned u; std::memcpy(&u, &x, 4); return u; }
inline float __uint_as_float(unsigned u) { float x; std::memcpy(&x, &u, 4); return x; }
using std::fmaxf; using std::fminf; using std::fmaf;
namespace cpu {
template <class... A, size_t... I> void call(void (*f)(A...), void** a, std::index_sequence<I...>) { f(*static_cast<std::remove_reference_t<A>*>(a[I])...); }
template <class... A> void call(void (*f)(A...), void** a) { call(f, a, std::index_sequence_for<A...>{}); }
template <class... A> int sizes(void (*)(A...), int* out) { int i = 0; ((out[i++] = (int)sizeof(A)), ...); return i; }
inline void (*entry)(void**); inline void** arguments;
inline void trampoline() { entry(arguments); cpu::yield(DONE); }
// order: 0 ascending, 1 descending, else a seed for random orders of blocks and of threads between barriers. Returns 0, or 1 for a barrier
// that not every thread of the block reaches.
inline int launch(void (*f)(void**), void** a, const unsigned* g, const unsigned* b, unsigned shared_bytes, unsigned order) {
  Machine& k = m(); k.grid = {g[0], g[1], g[2]}; k.block = {b[0], b[1], b[2]}; entry = f; arguments = a; k.random.seed(order);
  const size_t n = size_t(b[0]) * b[1] * b[2], stack = 32 << 10, blocks = size_t(g[0]) * g[1] * g[2];
  if (k.fibres.size() < n) { k.fibres.resize(n); k.stacks.resize(n * stack); }
  k.lanes.resize((n + 31) / 32 * 32); k.shared.resize(shared_bytes);
  std::vector<unsigned> turn(n), order_of(blocks);
  auto arrange = [&](std::vector<unsigned>& v) { for (size_t i = 0; i < v.size(); i++) v[i] = i; if (order == 1) std::reverse(v.begin(), v.end()); if (order > 1) std::shuffle(v.begin(), v.end(), k.random); };
  arrange(order_of);
  for (unsigned p : order_of) {
    k.place = {p % g[0], p / g[0] % g[1], p / g[0] / g[1]};
    std::memset(k.shared.data(), 0xFF, k.shared.size());  // NaN: nobody may read what nobody wrote
    for (size_t i = 0; i < n; i++) {
      Fibre& t = k.fibres[i]; t.state = RUN; t.number = i; t.shared_used = 0; t.thread = {unsigned(i % b[0]), unsigned(i / b[0] % b[1]), unsigned(i / b[0] / b[1])};
      getcontext(&t.context); t.context.uc_stack.ss_sp = k.stacks.data() + i * stack; t.context.uc_stack.ss_size = stack; t.context.uc_link = nullptr;
      makecontext(&t.context, trampoline, 0);
    }
    for (;;) {
      arrange(turn); bool ran = false;
      for (unsigned i : turn) if (k.fibres[i].state == RUN) { k.now = &k.fibres[i]; swapcontext(&k.main, &k.now->context); ran = true; }
      if (ran) {  // release warps whose every lane waits at a warp barrier
        for (size_t w = 0; w < n; w += 32) { bool all = true; for (size_t i = w; i < std::min(n, w + 32); i++) all &= k.fibres[i].state == WARP_BARRIER; if (all) for (size_t i = w; i < std::min(n, w + 32); i++) k.fibres[i].state = RUN; }
        continue;
      }
      size_t waiting = 0, done = 0; for (size_t i = 0; i < n; i++) { waiting += k.fibres[i].state == BLOCK_BARRIER; done += k.fibres[i].state == DONE; }
      if (done == n) break;
      if (waiting != n) return 1;
      for (size_t i = 0; i < n; i++) k.fibres[i].state = RUN;
      k.barriers++;
    }
  }
  return 0;
}
}  // namespace cpu
// Kernels of which no thread waits for another need no fibres; one that waits all the same is refused.
#define EXPORT_INDEPENDENT(name) EXPORT(name)
#define EXPORT(name) \
  extern "C" int launch_##name(void** a, const unsigned* g, const unsigned* b, unsigned shared_bytes, unsigned order) { \
    return cpu::launch([](void** x) { cpu::call(name, x); }, a, g, b, shared_bytes, order); } \
  extern "C" int sizes_##name(int* out) { return cpu::sizes(name, out); }
