/* A libcuda.so.1 without a GPU, to plan convolutions where there is no driver. cuDNN opens the driver's library and asks for
   these names before it will compile engines at run time; planning for a device by its properties calls none of them for an answer.
   Each says that there is no device. Built by `make gpu-plans`, and used by nothing else. */

enum { NO_DEVICE = 100, DRIVER_VERSION = 13000 };

/* The names, as cuDNN 9.19 asks for them. */
#define ABSENT(name) int name(void) { return NO_DEVICE; }

ABSENT(cuInit)
ABSENT(cuDeviceGet)
ABSENT(cuCtxGetCurrent)
ABSENT(cuCtxGetLimit)
ABSENT(cuCtxPopCurrent)
ABSENT(cuCtxPushCurrent)
ABSENT(cuGetErrorName)
ABSENT(cuGetErrorString)
ABSENT(cuGetProcAddress)
ABSENT(cuGetProcAddress_v2)
ABSENT(cuKernelGetAttribute)
ABSENT(cuKernelGetFunction)
ABSENT(cuKernelSetAttribute)
ABSENT(cuLaunchCooperativeKernel)
ABSENT(cuLaunchKernel)
ABSENT(cuLaunchKernelEx)
ABSENT(cuLibraryGetKernel)
ABSENT(cuLibraryLoadData)
ABSENT(cuLibraryLoadFromFile)
ABSENT(cuLibraryUnload)
ABSENT(cuLinkAddData)
ABSENT(cuLinkComplete)
ABSENT(cuLinkCreate)
ABSENT(cuLinkDestroy)
ABSENT(cuModuleGetFunction)
ABSENT(cuModuleLoadData)
ABSENT(cuModuleUnload)
ABSENT(cuOccupancyMaxPotentialClusterSize)
ABSENT(cuStreamGetCtx)
ABSENT(cuTensorMapEncodeIm2col)
ABSENT(cuTensorMapEncodeTiled)

int cuDeviceGetCount(int *count) {
  *count = 0;
  return NO_DEVICE;
}

int cuDriverGetVersion(int *version) {
  *version = DRIVER_VERSION;
  return 0;
}
