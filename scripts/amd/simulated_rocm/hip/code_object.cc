#include "code_object.h"

#include <elf.h>
#include <sys/mman.h>

#include <cstring>
#include <stdexcept>

#include "settings.h"

namespace simulated {
namespace {

constexpr char kBundleMagic[] = "__CLANG_OFFLOAD_BUNDLE__";
constexpr char kCompressedMagic[] = "CCOB";
constexpr uint32_t kAmdMetadataNote = 32;  // NT_AMDGPU_METADATA

template <class T>
T load(const uint8_t* bytes) {
  T value;
  memcpy(&value, bytes, sizeof value);
  return value;
}

// A value of msgpack, as far as kernel metadata uses it.
struct Metadata {
  uint64_t number = 0;
  std::string text;
  std::vector<Metadata> items;
  std::map<std::string, Metadata> fields;

  const Metadata& operator[](const std::string& name) const {
    static const Metadata none;
    const auto found = fields.find(name);
    return found == fields.end() ? none : found->second;
  }
};

class MetadataReader {
 public:
  MetadataReader(const uint8_t* bytes, size_t size) : at_(bytes), end_(bytes + size) {}

  Metadata read() {
    const uint8_t type = *take(1);
    if (type < 0x80) return number(type);
    if (type < 0x90) return table(type & 15);
    if (type < 0xa0) return array(type & 15);
    if (type < 0xc0) return text(type & 31);
    if (type >= 0xe0) return number(static_cast<uint64_t>(static_cast<int8_t>(type)));
    switch (type) {
      case 0xc0:  // nil
      case 0xc2:  // false
        return number(0);
      case 0xc3:  // true
        return number(1);
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf:
        return number(big_endian(1u << (type - 0xcc)));
      case 0xd0:
      case 0xd1:
      case 0xd2:
      case 0xd3:
        return number(big_endian(1u << (type - 0xd0)));
      case 0xd9:
      case 0xda:
      case 0xdb:
        return text(big_endian(1u << (type - 0xd9)));
      case 0xdc:
      case 0xdd:
        return array(big_endian(2u << (type - 0xdc)));
      case 0xde:
      case 0xdf:
        return table(big_endian(2u << (type - 0xde)));
      default:
        throw std::runtime_error("unknown type in the kernel metadata");
    }
  }

 private:
  const uint8_t* take(size_t bytes) {
    if (bytes > static_cast<size_t>(end_ - at_)) throw std::runtime_error("the kernel metadata is truncated");
    at_ += bytes;
    return at_ - bytes;
  }
  uint64_t big_endian(size_t bytes) {
    uint64_t value = 0;
    for (const uint8_t* byte = take(bytes); bytes > 0; --bytes) value = value << 8 | *byte++;
    return value;
  }
  static Metadata number(uint64_t value) {
    Metadata result;
    result.number = value;
    return result;
  }
  Metadata text(size_t bytes) {
    Metadata result;
    result.text.assign(reinterpret_cast<const char*>(take(bytes)), bytes);
    return result;
  }
  Metadata array(size_t count) {
    Metadata result;
    for (; count > 0; --count) result.items.push_back(read());
    return result;
  }
  Metadata table(size_t count) {
    Metadata result;
    for (; count > 0; --count) {
      const std::string name = read().text;
      result.fields[name] = read();
    }
    return result;
  }

  const uint8_t *at_, *end_;
};

const Elf64_Ehdr& header(const uint8_t* elf) { return *reinterpret_cast<const Elf64_Ehdr*>(elf); }

std::vector<Elf64_Phdr> segments(const uint8_t* elf) {
  std::vector<Elf64_Phdr> result(header(elf).e_phnum);
  memcpy(result.data(), elf + header(elf).e_phoff, result.size() * sizeof(Elf64_Phdr));
  return result;
}

std::vector<Elf64_Shdr> sections(const uint8_t* elf) {
  std::vector<Elf64_Shdr> result(header(elf).e_shnum);
  memcpy(result.data(), elf + header(elf).e_shoff, result.size() * sizeof(Elf64_Shdr));
  return result;
}

size_t aligned(size_t bytes) { return (bytes + 3) & ~size_t{3}; }

Metadata read_metadata(const uint8_t* elf) {
  for (const Elf64_Phdr& segment : segments(elf)) {
    if (segment.p_type != PT_NOTE) continue;
    for (size_t at = segment.p_offset; at + sizeof(Elf64_Nhdr) <= segment.p_offset + segment.p_filesz;) {
      const auto note = load<Elf64_Nhdr>(elf + at);
      const size_t contents = at + sizeof note + aligned(note.n_namesz);
      if (note.n_type == kAmdMetadataNote) return MetadataReader(elf + contents, note.n_descsz).read();
      at = contents + aligned(note.n_descsz);
    }
  }
  throw std::runtime_error("the code object has no kernel metadata");
}

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

// Whether a bundle's entry, such as "hipv4-amdgcn-amd-amdhsa--gfx942:xnack-", is for a target with these features.
bool matches(const std::string& entry, const std::string& target) {
  const size_t begin = entry.rfind("--");
  if (entry.compare(0, 3, "hip") != 0 || begin == std::string::npos) return false;
  std::string rest = entry.substr(begin + 2);
  const size_t colon = rest.find(':');
  if (rest.substr(0, colon) != target) return false;
  while (colon != std::string::npos && rest.size() > colon) {  // each feature of the entry is one of the device
    const size_t last = rest.rfind(':');
    const std::string feature = rest.substr(last), features = settings().features;
    if (features.find(feature + ":") == std::string::npos && !ends_with(features, feature)) return false;
    rest.resize(last);
  }
  return true;
}

}  // namespace

CodeObject::CodeObject(const uint8_t* elf) {
  if (memcmp(elf, ELFMAG, SELFMAG) != 0) throw std::runtime_error("the code object is not an ELF file");
  load_segments(elf);
  read_symbols(elf);
  read_kernels(elf);
}

CodeObject::~CodeObject() { munmap(memory_, memory_bytes_); }

void CodeObject::load_segments(const uint8_t* elf) {
  for (const Elf64_Shdr& section : sections(elf))
    if ((section.sh_type == SHT_RELA || section.sh_type == SHT_REL) && section.sh_size != 0)
      throw std::runtime_error("the code object has relocations, which the simulated HIP runtime does not apply");
  size_t end = 0;
  for (const Elf64_Phdr& segment : segments(elf))
    if (segment.p_type == PT_LOAD) end = std::max<size_t>(end, segment.p_vaddr + segment.p_memsz);
  memory_bytes_ = end + 4096;  // instructions are read in words, also the last
  void* memory = mmap(nullptr, memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw std::runtime_error("no memory for a code object");
  memory_ = static_cast<uint8_t*>(memory);
  for (const Elf64_Phdr& segment : segments(elf))
    if (segment.p_type == PT_LOAD) memcpy(memory_ + segment.p_vaddr, elf + segment.p_offset, segment.p_filesz);
}

void CodeObject::read_symbols(const uint8_t* elf) {
  const std::vector<Elf64_Shdr> all = sections(elf);
  for (const Elf64_Shdr& section : all) {
    if (section.sh_type != SHT_DYNSYM) continue;
    const char* names = reinterpret_cast<const char*>(elf + all[section.sh_link].sh_offset);
    for (size_t at = 0; at < section.sh_size; at += sizeof(Elf64_Sym)) {
      const auto symbol = load<Elf64_Sym>(elf + section.sh_offset + at);
      symbols_[names + symbol.st_name] = {symbol.st_value, symbol.st_size};
    }
  }
}

void CodeObject::read_kernels(const uint8_t* elf) {
  const Metadata metadata = read_metadata(elf);
  for (const Metadata& kernel : metadata["amdhsa.kernels"].items) {
    KernelDescription description;
    description.name = kernel[".name"].text;
    const auto descriptor = symbols_.find(kernel[".symbol"].text), code = symbols_.find(description.name);
    if (descriptor == symbols_.end() || code == symbols_.end())
      throw std::runtime_error("the code object lacks a symbol of kernel " + description.name);
    const uint8_t* bytes = memory_ + descriptor->second.first;
    description.code = memory_ + code->second.first;
    description.code_bytes = code->second.second;
    description.resources = load<uint32_t>(bytes + 52);
    description.properties = load<uint16_t>(bytes + 56);
    if (load<uint16_t>(bytes + 58) != 0)
      throw std::runtime_error("kernel " + description.name + " preloads its arguments, which is not simulated");
    description.scratch_bytes = kernel[".private_segment_fixed_size"].number;
    description.lds_bytes = kernel[".group_segment_fixed_size"].number;
    description.kernarg_bytes = kernel[".kernarg_segment_size"].number;
    description.max_threads = kernel[".max_flat_workgroup_size"].number;
    description.wave_size = kernel[".wavefront_size"].number;
    for (const Metadata& argument : kernel[".args"].items) {
      const uint32_t offset = argument[".offset"].number, size = argument[".size"].number;
      const std::string& kind = argument[".value_kind"].text;
      if (kind.compare(0, 7, "hidden_") == 0)
        description.hidden_arguments.push_back({kind, offset, size});
      else
        description.arguments.push_back({offset, size});
    }
    kernels_[description.name] = description;
  }
}

const KernelDescription* CodeObject::find_kernel(const std::string& name) const {
  const auto found = kernels_.find(name);
  return found == kernels_.end() ? nullptr : &found->second;
}

std::pair<void*, size_t> CodeObject::find_variable(const std::string& name) const {
  const auto found = symbols_.find(name);
  if (found == symbols_.end()) return {nullptr, 0};
  return {memory_ + found->second.first, found->second.second};
}

const uint8_t* find_code_object(const void* image, std::string* reason) {
  const auto* bytes = static_cast<const uint8_t*>(image);
  if (memcmp(bytes, ELFMAG, SELFMAG) == 0) return bytes;
  if (memcmp(bytes, kCompressedMagic, 4) == 0) {
    *reason = "the bundle is compressed: build with --no-offload-compress";
    return nullptr;
  }
  if (memcmp(bytes, kBundleMagic, sizeof kBundleMagic - 1) != 0) {
    *reason = "the image is neither a bundle nor an ELF file";
    return nullptr;
  }
  std::string entries;
  const std::string generic = generic_target(settings().target);
  const uint8_t* generic_code = nullptr;
  const uint8_t* at = bytes + sizeof kBundleMagic - 1;
  const auto count = load<uint64_t>(at);
  at += 8;
  for (uint64_t i = 0; i < count; ++i) {
    const auto offset = load<uint64_t>(at), size = load<uint64_t>(at + 8), length = load<uint64_t>(at + 16);
    const std::string entry(reinterpret_cast<const char*>(at + 24), length);
    at += 24 + length;
    if (size == 0) continue;
    if (matches(entry, settings().target)) return bytes + offset;
    if (!generic.empty() && matches(entry, generic)) generic_code = bytes + offset;
    entries += " " + entry;
  }
  if (generic_code == nullptr) *reason = "no code object for " + settings().target + " among" + entries;
  return generic_code;
}

}  // namespace simulated
