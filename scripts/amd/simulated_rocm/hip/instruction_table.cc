#include "instruction_table.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "settings.h"

extern char** environ;

namespace simulated {
namespace {

std::mutex mutex;
InstructionCompilerUse use;

const char* isa_name() {
  switch (settings().isa) {
    case Isa::kCdna:
      return settings().target == "gfx950" ? "cdna4" : "cdna";
    case Isa::kRdna3:
      return "rdna3";
    default:
      return "rdna4";
  }
}

std::string folder() { return settings().cache + "/" + isa_name(); }

// The instruction compiler as a process of its own, so that this one needs no Python. It ends when this one does.
class InstructionCompiler {
 public:
  // Writes the table of the machine code in `code_file`. Throws std::runtime_error.
  void compile(const std::string& code_file) {
    if (pid_ != getpid()) start();  // also after a fork
    const std::string line = code_file + "\n";
    if (send(socket_, line.data(), line.size(), MSG_NOSIGNAL) != static_cast<ssize_t>(line.size()))
      throw std::runtime_error("the instruction compiler does not answer: see its message above");
    const std::string answer = read_line();
    if (!answer.empty()) throw std::runtime_error(answer);
  }

 private:
  void start() {
    if (settings().instruction_compiler.empty())
      throw std::runtime_error(
          "kernels need an instruction compiler: run this through scripts/amd/simulate with --tinygrad, or with "
          "--kernels skip");
    int sockets[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, sockets) != 0) throw std::runtime_error("no socket");
    const std::string command =
        "exec " + settings().instruction_compiler + " --isa " + isa_name() + " --folder '" + folder() + "'";
    const char* arguments[] = {"/bin/sh", "-c", command.c_str(), nullptr};
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, sockets[1], 0);
    posix_spawn_file_actions_adddup2(&actions, sockets[1], 1);
    pid_t child;
    const int error = posix_spawn(&child, arguments[0], &actions, nullptr, const_cast<char**>(arguments), environ);
    posix_spawn_file_actions_destroy(&actions);
    close(sockets[1]);
    if (error != 0) throw std::runtime_error(std::string("cannot start the instruction compiler: ") + strerror(error));
    socket_ = sockets[0];
    pid_ = getpid();
  }

  std::string read_line() {
    std::string line;
    for (char byte; read(socket_, &byte, 1) == 1; line += byte)
      if (byte == '\n') return line;
    pid_ = 0;
    throw std::runtime_error("the instruction compiler ended: see its message above");
  }

  pid_t pid_ = 0;  // the process that started it
  int socket_ = -1;
};

uint64_t hash(const uint8_t* bytes, size_t count) {  // FNV-1a
  uint64_t value = 0xcbf29ce484222325;
  for (size_t i = 0; i < count; ++i) value = (value ^ bytes[i]) * 0x100000001b3;
  return value;
}

// Writes a file that other processes see whole or not at all.
void write_file(const std::string& path, const uint8_t* bytes, size_t count) {
  const std::string temporary = path + "." + std::to_string(getpid());
  std::ofstream(temporary, std::ios::binary).write(reinterpret_cast<const char*>(bytes), count);
  if (rename(temporary.c_str(), path.c_str()) != 0) throw std::runtime_error("cannot write " + path);
}

Instruction read_function(std::istringstream& line) {
  std::string library, symbol, arguments;
  int flags = 0;
  line >> library >> symbol >> flags >> arguments;
  void* handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) throw std::runtime_error(dlerror());
  Instruction instruction;
  instruction.run = reinterpret_cast<InstructionFunction>(dlsym(handle, symbol.c_str()));
  if (instruction.run == nullptr) throw std::runtime_error(dlerror());
  instruction.is_barrier = flags & 1;
  instruction.needs_lock = flags & 2;
  std::istringstream numbers(arguments);
  std::string one;
  for (size_t i = 0; i < 6 && std::getline(numbers, one, ','); ++i) instruction.arguments[i] = std::stoi(one);
  return instruction;
}

// Null if there is no such file, or if it names a library that is gone.
std::shared_ptr<const InstructionTable> read_table(const std::string& path, size_t code_bytes) {
  std::ifstream file(path);
  if (!file) return nullptr;
  auto table = std::make_shared<InstructionTable>();
  table->instructions.resize(code_bytes / 4);
  std::vector<Instruction> functions;
  for (std::string text; std::getline(file, text);) {
    std::istringstream line(text);
    std::string kind;
    size_t offset, number;
    line >> kind;
    if (kind == "function") {
      functions.push_back(read_function(line));
    } else if (kind == "at") {
      line >> offset >> number;
      table->instructions.at(offset / 4) = functions.at(number);
    } else {
      line >> offset;
      std::getline(line >> std::ws, table->reasons[offset]);
    }
  }
  return table;
}

}  // namespace

std::shared_ptr<const InstructionTable> load_instruction_table(const KernelDescription& kernel) {
  static auto* tables = new std::map<std::string, std::shared_ptr<const InstructionTable>>;
  static auto* compiler = new InstructionCompiler;
  char name[64];
  snprintf(name, sizeof name, "/%016lx-%zx", hash(kernel.code, kernel.code_bytes), kernel.code_bytes);
  std::lock_guard<std::mutex> lock(mutex);
  std::shared_ptr<const InstructionTable>& table = (*tables)[name];
  if (table != nullptr) return table;
  const std::string path = folder() + name;
  table = read_table(path + ".table", kernel.code_bytes);
  if (table != nullptr) return table;
  const auto begin = std::chrono::steady_clock::now();
  mkdir(folder().c_str(), 0777);
  write_file(path + ".code", kernel.code, kernel.code_bytes);
  compiler->compile(path + ".code");
  table = read_table(path + ".table", kernel.code_bytes);
  if (table == nullptr) throw std::runtime_error("the instruction compiler wrote no " + path + ".table");
  ++use.kernels;
  use.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return table;
}

InstructionCompilerUse instruction_compiler_use() {
  std::lock_guard<std::mutex> lock(mutex);
  return use;
}

}  // namespace simulated
