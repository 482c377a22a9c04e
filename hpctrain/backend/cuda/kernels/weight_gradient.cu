// The gradient of a weight from what a convolution has written in the dtype of activations; zeros where it has written nothing.
#include "common.cuh"

template <class T> __device__ __forceinline__ void weight_gradient(const T* rounded, typename Sum<T>::type* gradient, int64_t items) {
  for (int64_t i = first_item(); i < items; i += item_step()) gradient[i] = rounded ? value(rounded[i]) : 0;
}

#define MAKE(T, tag)                                                                                                      \
  extern "C" __global__ void weight_gradient_##tag(const T* rounded, Sum<T>::type* gradient, int64_t items) {             \
    weight_gradient(rounded, gradient, items);                                                                            \
  }                                                                                                                       \
  EXPORT_INDEPENDENT(weight_gradient_##tag)
MAKE(float, f32) MAKE(bf16, bf16)
#ifdef ON_CPU
MAKE(double, f64)
#endif
