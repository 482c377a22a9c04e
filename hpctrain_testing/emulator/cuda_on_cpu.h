// CUDA C on a CPU: its words, its types and the functions that kernels here use. Threads, barriers and shared memory are in
// machine.h. Differences to a GPU: no fused multiply-add unless it is written, no approximations, and memory that never lags.
#pragma once
#include <math.h>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#include "launches.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __launch_bounds__(...)
#define threadIdx (cpu::thread_index)
#define blockIdx (cpu::block_index)
#define blockDim (cpu::block_size)
#define gridDim (cpu::grid_size)
constexpr int warpSize = 32;

struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- what threads do together: every use has its place in the source, so that threads at different places are an error ----

#define CPU_TEXT_(x) #x
#define CPU_TEXT(x) CPU_TEXT_(x)
#define CPU_PLACE(what) what " of " __FILE__ ":" CPU_TEXT(__LINE__)
#define __syncthreads() cpu::block_barrier(CPU_PLACE("__syncthreads"))
#define CPU_SYNCWARP(mask, ...) cpu::warp_barrier(CPU_PLACE("__syncwarp"), mask, cpu::Exchange::NONE, 0)
#define __syncwarp(...) CPU_SYNCWARP(__VA_ARGS__ __VA_OPT__(,) 0xffffffffu)
#define __shfl_sync(mask, value, lane) cpu::shuffled(CPU_PLACE("__shfl_sync"), mask, value, unsigned(lane) % 32)
#define __shfl_xor_sync(mask, value, bits) cpu::shuffled(CPU_PLACE("__shfl_xor_sync"), mask, value, cpu::partner_lane(bits))
#define __shfl_down_sync(mask, value, by) cpu::shuffled(CPU_PLACE("__shfl_down_sync"), mask, value, cpu::lane_below(by))
#define __shfl_up_sync(mask, value, by) cpu::shuffled(CPU_PLACE("__shfl_up_sync"), mask, value, cpu::lane_above(by))
#define __ballot_sync(mask, vote) cpu::ballot(CPU_PLACE("__ballot_sync"), mask, vote)
#define __any_sync(mask, vote) (cpu::ballot(CPU_PLACE("__any_sync"), mask, vote) != 0)
#define __all_sync(mask, vote) (cpu::ballot(CPU_PLACE("__all_sync"), mask, vote) == (mask))
#define SHARED(T, name, n) \
  static char name##_declaration; \
  T* const name = cpu::shared<T, (n)>(&name##_declaration, CPU_PLACE("SHARED"))
#define REQUIRE_ALIGNED(p, bytes) cpu::require_aligned(p, bytes)

namespace cpu {
// The lanes that shuffles take their values from; by a distance beyond the warp's ends their own.
inline unsigned partner_lane(unsigned bits) { return (lane_number() ^ bits) % WARP; }
inline unsigned lane_below(unsigned by) { const unsigned lane = lane_number(); return lane + by < WARP ? lane + by : lane; }
inline unsigned lane_above(unsigned by) { const unsigned lane = lane_number(); return by <= lane ? lane - by : lane; }
template <class T, size_t n> T* shared(const void* declaration, const char* place) {
  return static_cast<T*>(shared_array(declaration, n * sizeof(T), place));
}
}  // namespace cpu

// ---- arithmetic ----

template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T min(T a, T b) { return b < a ? b : a; }
template <class T> inline T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline float __int2float_rn(int x) { return float(x); }
inline float __uint2float_rn(unsigned x) { return float(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rz(float x) { return int(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)(a) * b >> 64);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }

namespace cpu {
template <class To, class From> inline To same_bits(From x) {
  static_assert(sizeof(To) == sizeof(From), "of one size");
  To y;
  memcpy(&y, &x, sizeof y);
  return y;
}
}  // namespace cpu
inline unsigned __float_as_uint(float x) { return cpu::same_bits<unsigned>(x); }
inline int __float_as_int(float x) { return cpu::same_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cpu::same_bits<float>(x); }
inline float __int_as_float(int x) { return cpu::same_bits<float>(x); }
inline long long __double_as_longlong(double x) { return cpu::same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cpu::same_bits<double>(x); }

// ---- what a library offers: for each kernel `launch_<name>`, and `parameters_<name>`, the types of its parameters as text ----

struct bf16;
namespace cpu {
template <class T> struct Name {
  static const char* text() {
    constexpr bool whole = (T)0.5f == (T)0, negative = (T)-1 < (T)0;
    if (whole) return sizeof(T) == 1 ? (negative ? "int8" : "uint8") : sizeof(T) == 2 ? (negative ? "int16" : "uint16")
                    : sizeof(T) == 4 ? (negative ? "int32" : "uint32") : negative ? "int64" : "uint64";
    return sizeof(T) == 4 ? "float32" : "float64";
  }
};
template <> struct Name<bool> { static const char* text() { return "bool"; } };
template <> struct Name<bf16> { static const char* text() { return "bfloat16"; } };
template <> struct Name<void> { static const char* text() { return "void"; } };
template <class T> struct Name<const T> { static const char* text() { return Name<T>::text(); } };

template <class T, class = void> struct Parameter {  // a structure
  static void write(char* out, size_t size) { snprintf(out, size, "bytes %zu", sizeof(T)); }
};
template <class T> struct Parameter<T, std::enable_if_t<std::is_arithmetic_v<T>>> {
  static void write(char* out, size_t size) { snprintf(out, size, "%s", Name<T>::text()); }
};
template <class T>
constexpr bool is_named = std::is_arithmetic_v<T> || std::is_void_v<T> || std::is_same_v<std::remove_const_t<T>, bf16>;
template <class T> struct Parameter<T*> {
  static void write(char* out, size_t size) {
    if constexpr (is_named<T>) snprintf(out, size, "pointer %s", Name<T>::text());
    else snprintf(out, size, "pointer void");
  }
};

template <class... A, size_t... I> inline void call(void (*f)(A...), void** a, std::index_sequence<I...>) {
  f(*static_cast<std::remove_reference_t<A>*>(a[I])...);
}
template <class... A> inline void call(void (*f)(A...), void** a) { call(f, a, std::index_sequence_for<A...>{}); }

// One line each, to `out`; returns their number.
template <class... A> inline int parameters(void (*)(A...), char* out, size_t size) {
  const char* const end = out + size;
  ((Parameter<std::remove_cv_t<A>>::write(out, end - out), out += strlen(out), out + 1 < end ? *out++ = '\n' : 0), ...);
  if (out < end) *out = 0;
  return int(sizeof...(A));
}
}  // namespace cpu

#define CPU_EXPORT(name, entry, independent) \
  static void thread_of_##name(void** a) { cpu::call(name, a); } \
  extern "C" __attribute__((visibility("default"))) int launch_##name(void** a, cpu::Launch* request) { \
    return cpu::launch(#name, entry, independent, a, request); \
  } \
  extern "C" __attribute__((visibility("default"))) int parameters_##name(char* out, size_t size) { \
    return cpu::parameters(name, out, size); \
  }
#define EXPORT(name) CPU_EXPORT(name, thread_of_##name, false)
// Kernels of which no thread waits for another need no fibres; one that waits all the same is refused.
#define EXPORT_INDEPENDENT(name) CPU_EXPORT(name, cpu::run_independent_block<thread_of_##name>, true)
