// AMD code objects: the ELF files in HIP's bundles, loaded into executable order in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace simulated {

struct KernelArgument {
  uint32_t offset, bytes;
};

// An argument that the runtime fills in, named as in the metadata: "hidden_block_count_x".
struct HiddenArgument {
  std::string kind;
  uint32_t offset, bytes;
};

struct KernelDescription {
  std::string name;
  const uint8_t* code = nullptr;
  size_t code_bytes = 0;
  uint32_t resources = 0;   // COMPUTE_PGM_RSRC2
  uint32_t properties = 0;  // of the kernel's code: which registers hold which pointer at the start
  uint32_t scratch_bytes = 0, lds_bytes = 0, kernarg_bytes = 0, max_threads = 1024, wave_size = 0;
  std::vector<KernelArgument> arguments;
  std::vector<HiddenArgument> hidden_arguments;
};

class CodeObject {
 public:
  // Loads an ELF. Throws std::runtime_error if it is invalid or needs relocations.
  explicit CodeObject(const uint8_t* elf);
  ~CodeObject();
  CodeObject(const CodeObject&) = delete;

  // The kernel of this name, or null.
  const KernelDescription* find_kernel(const std::string& name) const;
  // Address and size of a variable; a null address if there is none.
  std::pair<void*, size_t> find_variable(const std::string& name) const;

 private:
  void load_segments(const uint8_t* elf);
  void read_symbols(const uint8_t* elf);
  void read_kernels(const uint8_t* elf);

  uint8_t* memory_ = nullptr;
  size_t memory_bytes_ = 0;
  std::map<std::string, std::pair<uint64_t, uint64_t>> symbols_;  // offset and size
  std::map<std::string, KernelDescription> kernels_;
};

// The ELF for the simulated target in a bundle (or the ELF itself), or null with a reason: an entry for the target,
// else for its generic target.
const uint8_t* find_code_object(const void* image, std::string* reason);

}  // namespace simulated
