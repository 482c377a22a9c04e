// Products, sums, quotients and roots, each rounded separately and never fused, so that a GPU computes the same bits as a CPU.
#ifdef ON_CPU  // compiled with -ffp-contract=off
template <class S> inline S exact_product(S a, S b) { return a * b; }
template <class S> inline S exact_sum(S a, S b) { return a + b; }
template <class S> inline S exact_difference(S a, S b) { return a - b; }
template <class S> inline S exact_quotient(S a, S b) { return a / b; }
inline float exact_root(float a) { return __builtin_sqrtf(a); }
inline double exact_root(double a) { return __builtin_sqrt(a); }
#else
__device__ __forceinline__ float exact_product(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float exact_sum(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float exact_difference(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ float exact_quotient(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float exact_root(float a) { return __fsqrt_rn(a); }
__device__ __forceinline__ double exact_product(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ double exact_sum(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ double exact_difference(double a, double b) { return __dsub_rn(a, b); }
__device__ __forceinline__ double exact_quotient(double a, double b) { return __ddiv_rn(a, b); }
#endif
