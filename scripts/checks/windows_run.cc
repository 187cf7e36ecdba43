// windows_run.exe ORT MODEL FOLDER [provider|library DLL]: runs a model once in ONNX Runtime's DLL, with our execution
// provider, with our operator library, or with neither. FOLDER/inputs.txt has a line for each input: name, f or i
// (float32 or int64), rank, dimensions; FOLDER/NAME.bin its elements. Writes the first output, float32, to output.bin.
#include <onnxruntime_c_api.h>
#include <windows.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {

const OrtApi* api;

void check(OrtStatus* status, const char* what) {
  if (status == nullptr) return;
  std::printf("%s: %s\n", what, api->GetErrorMessage(status));
  std::exit(1);
}

std::wstring wide(const char* text) { return {text, text + std::string(text).size()}; }

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4 && count != 6) return 2;
  const std::string folder = arguments[3], kind = count == 6 ? arguments[4] : "";
  const HMODULE library = LoadLibraryA(arguments[1]);
  if (library == nullptr) {
    std::printf("%s does not load: error %lu\n", arguments[1], GetLastError());
    return 1;
  }
  const auto base = reinterpret_cast<const OrtApiBase*(ORT_API_CALL*)()>(
      reinterpret_cast<void*>(GetProcAddress(library, "OrtGetApiBase")));
  api = base()->GetApi(ORT_API_VERSION);
  OrtEnv* environment = nullptr;
  OrtSessionOptions* options = nullptr;
  check(api->CreateEnv(ORT_LOGGING_LEVEL_WARNING, "windows_run", &environment), "environment");
  check(api->CreateSessionOptions(&options), "options");
  if (kind == "library") check(api->RegisterCustomOpsLibrary_V2(options, wide(arguments[5]).c_str()), "operators");
  if (kind == "provider") {
    check(api->RegisterExecutionProviderLibrary(environment, "sd_ort", wide(arguments[5]).c_str()), "provider");
    const OrtEpDevice* const* devices = nullptr;
    size_t device_count = 0;
    check(api->GetEpDevices(environment, &devices, &device_count), "devices");
    const OrtEpDevice* ours = nullptr;
    for (size_t i = 0; i < device_count; ++i) {
      if (std::string(api->EpDevice_EpName(devices[i])).rfind("SdOrt", 0) == 0) ours = devices[i];
    }
    if (ours == nullptr) {
      std::printf("the provider has no device\n");
      return 1;
    }
    check(api->DisableMemPattern(options), "memory pattern");
    check(api->SessionOptionsAppendExecutionProvider_V2(options, environment, &ours, 1, nullptr, nullptr, 0), "append");
    std::printf("device of %s\n", api->EpDevice_EpName(ours));
  }
  OrtSession* session = nullptr;
  check(api->CreateSession(environment, wide(arguments[2]).c_str(), options, &session), "session");
  OrtAllocator* allocator = nullptr;
  OrtMemoryInfo* memory = nullptr;
  check(api->GetAllocatorWithDefaultOptions(&allocator), "allocator");
  check(api->CreateCpuMemoryInfo(OrtArenaAllocator, OrtMemTypeDefault, &memory), "memory");
  std::vector<std::string> names;
  std::vector<std::vector<char>> data;
  std::vector<OrtValue*> values;
  std::ifstream list(folder + "/inputs.txt");
  for (std::string line; std::getline(list, line);) {
    std::istringstream words(line);
    std::string name, type;
    size_t rank = 0;
    words >> name >> type >> rank;
    std::vector<int64_t> shape(rank);
    for (int64_t& size : shape) words >> size;
    data.push_back(read(folder + "/" + name + ".bin"));
    OrtValue* value = nullptr;
    check(api->CreateTensorWithDataAsOrtValue(
              memory, data.back().data(), data.back().size(), shape.data(), rank,
              type == "f" ? ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT : ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, &value),
          name.c_str());
    names.push_back(name);
    values.push_back(value);
  }
  std::vector<const char*> input_names;
  for (const std::string& name : names) input_names.push_back(name.c_str());
  char* output_name = nullptr;
  OrtValue* output = nullptr;
  check(api->SessionGetOutputName(session, 0, allocator, &output_name), "output's name");
  check(api->Run(session, nullptr, input_names.data(), values.data(), values.size(), &output_name, 1, &output), "run");
  OrtTensorTypeAndShapeInfo* info = nullptr;
  size_t elements = 0;
  void* result = nullptr;
  check(api->GetTensorTypeAndShape(output, &info), "output's shape");
  check(api->GetTensorShapeElementCount(info, &elements), "output's size");
  check(api->GetTensorMutableData(output, &result), "output");
  std::ofstream(folder + "/output.bin", std::ios::binary).write(static_cast<char*>(result), elements * sizeof(float));
  std::printf("onnxruntime %s ran %s\n", base()->GetVersionString(), output_name);
  std::fflush(stdout);
  ExitProcess(0);  // a provider's library must outlive its environment
}
