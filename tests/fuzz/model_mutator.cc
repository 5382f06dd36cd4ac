// Damages a model file inside: changes a record and writes the archive anew around it, checksums
// and all; every fourth time the file as it is.

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"

extern "C" size_t LLVMFuzzerMutate(uint8_t* data, size_t size, size_t max_size);

namespace epikv {
namespace {

class Bytes : public caffe2::serialize::ReadAdapterInterface {
 public:
  explicit Bytes(absl::string_view bytes) : bytes_(bytes) {}
  size_t size() const override { return bytes_.size(); }
  size_t read(uint64_t at, void* to, size_t n, const char*) const override {
    const size_t begin = std::min<size_t>(at, bytes_.size());
    const size_t count = std::min(n, bytes_.size() - begin);
    std::memcpy(to, bytes_.data() + begin, count);
    return count;
  }

 private:
  const absl::string_view bytes_;
};

using Records = std::vector<std::pair<std::string, std::string>>;

// Throws where it is no archive.
Records ReadArchive(absl::string_view bytes) {
  caffe2::serialize::PyTorchStreamReader reader(std::make_shared<Bytes>(bytes));
  Records records;
  for (const std::string& name : reader.getAllRecords()) {
    const auto [data, size] = reader.getRecord(name);
    records.emplace_back(name, std::string(static_cast<const char*>(data.get()), size));
  }
  return records;
}

std::string WriteArchive(const Records& records) {
  std::string bytes;
  caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  for (const auto& [name, data] : records) {
    if (name == "version" || name == ".data/serialization_id") continue;  // it writes its own
    if (absl::EndsWith(name, ".debug_pkl")) continue;                     // nobody reads them
    writer.writeRecord(name, data.data(), data.size());
  }
  writer.writeEndOfFile();
  return bytes;
}

}  // namespace
}  // namespace epikv

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  if (seed % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  try {
    epikv::Records records = epikv::ReadArchive({reinterpret_cast<const char*>(data), size});
    if (records.empty()) return LLVMFuzzerMutate(data, size, max_size);
    std::string& record = records[seed / 4 % records.size()].second;
    const size_t room = record.size() + 64;
    std::string changed = record;
    changed.resize(room);
    changed.resize(
        LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(changed.data()), record.size(), room));
    record = std::move(changed);
    const std::string bytes = epikv::WriteArchive(records);
    if (bytes.size() <= max_size) {
      std::memcpy(data, bytes.data(), bytes.size());
      return bytes.size();
    }
  } catch (const std::exception&) {  // no archive any more
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
