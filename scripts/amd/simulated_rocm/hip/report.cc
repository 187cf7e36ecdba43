#include "report.h"

#include <unistd.h>

#include <cinttypes>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>

#include "module.h"
#include "settings.h"

namespace simulated {
namespace {

std::mutex mutex;
std::map<std::string, uint64_t>& calls() {
  static auto* map = new std::map<std::string, uint64_t>;
  return *map;
}

std::string report_path() {
  std::string path = settings().report;
  const size_t process = path.find("%p");
  return process == std::string::npos ? path : path.replace(process, 2, std::to_string(getpid()));
}

void write_use(FILE* file, const KernelUse& use) {
  fprintf(file, "{\"launches\": %" PRIu64 ", \"waves\": %" PRIu64 ", \"wave_instructions\": %" PRIu64, use.launches,
          use.waves, use.wave_instructions);
  fprintf(file, ", \"seconds\": %.3f}", use.seconds);
}

}  // namespace

void count_call(const char* function) {
  if (settings().report.empty()) return;
  std::lock_guard<std::mutex> lock(mutex);
  ++calls()[function];
}

void write_report() {
  if (settings().report.empty()) return;
  std::lock_guard<std::mutex> lock(mutex);
  if (calls().empty()) return;  // a process without HIP, such as a shell
  FILE* file = fopen(report_path().c_str(), "w");
  if (file == nullptr) {
    print_message("cannot write the report %s.", report_path().c_str());
    return;
  }
  const InstructionCompilerUse compiler = instruction_compiler_use();
  KernelUse total;
  fprintf(file, "{\n \"target\": \"%s\",\n \"kernels\": {", settings().target.c_str());
  const char* separator = "\n";
  for (const auto& [name, use] : kernel_use()) {
    fprintf(file, "%s  \"%s\": ", separator, name.c_str());
    write_use(file, use);
    separator = ",\n";
    total.launches += use.launches;
    total.waves += use.waves;
    total.wave_instructions += use.wave_instructions;
    total.seconds += use.seconds;
  }
  fprintf(file, "\n },\n \"total\": ");
  write_use(file, total);
  fprintf(file, ",\n \"compiled\": {\"kernels\": %" PRIu64 ", \"seconds\": %.3f},\n \"calls\": {", compiler.kernels,
          compiler.seconds);
  separator = "\n";
  for (const auto& [name, count] : calls()) {
    fprintf(file, "%s  \"%s\": %" PRIu64, separator, name.c_str(), count);
    separator = ",\n";
  }
  fprintf(file, "\n }\n}\n");
  fclose(file);
}

}  // namespace simulated
