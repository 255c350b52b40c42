// The driver's functions that the host program calls itself: from the toolkit where there is one,
// else declared here, so that the program builds on any machine that has the driver.
#pragma once

#if __has_include(<cuda.h>)
#include <cuda.h>
#else
#include <cstddef>
extern "C" {
typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef struct CUctx_st* CUcontext;
typedef struct CUstream_st* CUstream;
typedef struct CUgraph_st* CUgraph;
typedef struct CUgraphExec_st* CUgraphExec;
enum CUstreamCaptureMode { CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1 };
#define cuMemAlloc cuMemAlloc_v2
#define cuMemcpyHtoD cuMemcpyHtoD_v2
#define cuMemcpyDtoH cuMemcpyDtoH_v2
#define cuStreamBeginCapture cuStreamBeginCapture_v2
#define CU_STREAM_NON_BLOCKING 1
CUresult cuInit(unsigned);
CUresult cuDeviceGet(CUdevice*, int);
CUresult cuDevicePrimaryCtxRetain(CUcontext*, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuGetErrorName(CUresult, const char**);
CUresult cuMemAlloc(CUdeviceptr*, size_t);
CUresult cuMemHostAlloc(void**, size_t, unsigned);
CUresult cuMemcpyHtoD(CUdeviceptr, const void*, size_t);
CUresult cuMemcpyDtoH(void*, CUdeviceptr, size_t);
CUresult cuStreamCreate(CUstream*, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamBeginCapture(CUstream, CUstreamCaptureMode);
CUresult cuStreamEndCapture(CUstream, CUgraph*);
CUresult cuGraphInstantiateWithFlags(CUgraphExec*, CUgraph, unsigned long long);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
}
#endif
