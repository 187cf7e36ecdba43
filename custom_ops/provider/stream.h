// ONNX Runtime's view of a session's stream, events on it, and copies between host and device.
#pragma once

#include "provider/device.h"
#include "provider/ort.h"
#include "provider/upload.h"

namespace sd_ort {

// The session's stream, which the provider owns.
class SyncStream : public OrtSyncStreamImpl {
 public:
  SyncStream(device::Stream stream, int device);

 private:
  device::Stream stream_;
  int device_;
};

// Copies tensors between host and device. The factory owns the only instance.
class DataTransfer : public OrtDataTransferImpl {
 public:
  DataTransfer();

 private:
  Upload upload_;
};

}  // namespace sd_ort
