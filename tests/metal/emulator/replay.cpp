// Runs launches that Python recorded, in a sanitizer build. Every buffer is an
// allocation of its exact size, so that an access behind it is found.
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>

#include "engine.h"

static std::ifstream file;

template <typename T>
static T read() {
  T value;
  file.read(reinterpret_cast<char*>(&value), sizeof(T));
  return value;
}

// Buffers of one number are the same memory; their bytes come with the first.
static void* read_buffer(std::map<uint64_t, char*>& known) {
  auto number = read<uint64_t>();
  auto offset = read<uint64_t>();
  auto bytes = read<uint64_t>();
  if (!known.count(number)) {
    known[number] = static_cast<char*>(std::malloc(bytes));
    file.read(known[number], bytes);
  }
  return known[number] + offset;
}

int main(int, char** argv) {
  file.open(argv[1], std::ios::binary);
  std::map<uint64_t, char*> known;
  for (auto launches = read<uint32_t>(); launches > 0; --launches) {
    std::string kernel(read<uint32_t>(), '\0');
    file.read(&kernel[0], kernel.size());
    uint32_t sizes[6];
    for (auto& size : sizes) {
      size = read<uint32_t>();
    }
    auto seed = read<uint64_t>();
    void* buffers[31] = {};
    for (auto count = read<uint32_t>(); count > 0; --count) {
      auto index = read<uint32_t>();
      buffers[index] = read_buffer(known);
    }
    if (auto error = emulator_launch(
            kernel.c_str(), sizes, sizes + 3, buffers, 31, seed)) {
      std::fprintf(stderr, "%s: %s\n", kernel.c_str(), error);
      return 1;
    }
  }
  for (auto& buffer : known) {
    std::free(buffer.second);
  }
}
