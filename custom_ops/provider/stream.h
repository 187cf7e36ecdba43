// ONNX Runtime's view of a session's stream, events on it, and copies between host and device.
#pragma once

#include "provider/device.h"
#include "provider/ort.h"
#include "provider/upload.h"

namespace sd_ort {

// A stream that somebody else owns: all work of a session is in one.
class SyncStream : public OrtSyncStreamImpl {
 public:
  SyncStream(device::Stream stream, int device);

 private:
  device::Stream stream_;
  int device_;
};

// Copies tensors between host and device. One for the process, owned by the factory.
class DataTransfer : public OrtDataTransferImpl {
 public:
  DataTransfer();

 private:
  Upload upload_;
};

}  // namespace sd_ort
