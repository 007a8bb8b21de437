// A libnvrtc.so without a compiler, for tests: it takes sources and options as NVRTC does, and its images are
// lists of the options, which the fake driver (fake_driver.cc) turns into emulated kernels. A source with the
// line "#error" does not compile, and neither does one whose headers are not all there.
#include <cstring>
#include <iterator>
#include <sstream>
#include <string>
#include <vector>

namespace {
constexpr int kArchitectures[] = {80, 90, 100, 120};
constexpr int kInvalidProgram = 4, kCompilation = 6;

struct Program {
  std::vector<std::string> sources, headers;
  std::string log, image;
};
int version = 13, compilations = 0;

// The emulator's header is for the emulator alone.
bool IsThere(const Program& program, const std::string& name) {
  if (name == "cuda/emulate.h") return true;
  for (const std::string& header : program.headers)
    if (header == name) return true;
  return false;
}

std::string WrongLine(const Program& program) {
  for (const std::string& source : program.sources) {
    std::istringstream lines(source);
    for (std::string line; std::getline(lines, line);) {
      if (line.rfind("#error", 0) == 0) return "kernels.cu(1): catastrophic error: " + line;
      if (line.rfind("#include", 0) != 0) continue;
      const std::size_t begin = line.find_first_of("<\"") + 1;
      const std::string name = line.substr(begin, line.find_first_of(">\"", begin) - begin);
      if (!IsThere(program, name)) return "cannot open source file \"" + name + "\"";
    }
  }
  return "";
}

Program* Of(void* program) { return static_cast<Program*>(program); }
}  // namespace

extern "C" {
void fake_nvrtc_set_version(int major) { version = major; }
int fake_nvrtc_compilations() { return compilations; }

int nvrtcVersion(int* major, int* minor) {
  *major = version, *minor = 0;
  return 0;
}
int nvrtcGetNumSupportedArchs(int* count) {
  *count = static_cast<int>(std::size(kArchitectures));
  return 0;
}
int nvrtcGetSupportedArchs(int* architectures) {
  std::memcpy(architectures, kArchitectures, sizeof kArchitectures);
  return 0;
}
int nvrtcCreateProgram(void** program, const char* source, const char*, int count, const char* const* headers,
                       const char* const* names) {
  auto* made = new Program;
  made->sources.push_back(source);
  for (int i = 0; i < count; ++i) made->sources.push_back(headers[i]), made->headers.push_back(names[i]);
  *program = made;
  return 0;
}
int nvrtcCompileProgram(void* program, int count, const char* const* options) {
  ++compilations;
  Program* const compiled = Of(program);
  compiled->log = WrongLine(*compiled);
  if (!compiled->log.empty()) return kCompilation;
  compiled->image = "fake cubin";
  for (int i = 0; i < count; ++i) compiled->image += std::string("\n") + options[i];
  return 0;
}
int nvrtcGetProgramLogSize(void* program, std::size_t* size) {
  *size = Of(program)->log.size() + 1;
  return 0;
}
int nvrtcGetProgramLog(void* program, char* log) {
  std::strcpy(log, Of(program)->log.c_str());
  return 0;
}
int nvrtcGetCUBINSize(void* program, std::size_t* size) {
  *size = Of(program)->image.size() + 1;
  return Of(program)->image.empty() ? kInvalidProgram : 0;
}
int nvrtcGetCUBIN(void* program, char* image) {
  std::strcpy(image, Of(program)->image.c_str());
  return 0;
}
int nvrtcDestroyProgram(void** program) {
  delete Of(*program);
  *program = nullptr;
  return 0;
}
}
