// Damages a model file inside: changes a record and writes the archive anew around it, checksums
// and all; every fourth time the file as it is. Code is changed by lines, too: calls come in that
// no model file may make.

#include <caffe2/serialize/inline_container.h>
#include <caffe2/serialize/read_adapter_interface.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
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

// What reads or writes files, prints, draws, keeps state, starts threads, or shows memory that
// nobody wrote, as code of a model file spells it. $T: a tensor.
constexpr absl::string_view kForbidden[] = {
    R"(torch.save([1], "epikv-canary"))",
    R"(ops.aten.save([1], "epikv-canary"))",
    R"(torch.from_file("epikv-canary", True, 4))",
    R"(ops.aten.from_file("epikv-canary", False, 4, dtype=0))",
    R"(print("epikv-canary"))",
    "torch.rand([2])",
    "torch.randn_like($T)",
    "torch.empty([4])",
    "torch.dropout($T, 0.5, True)",
    "torch.alpha_dropout($T, 0.5, True)",
    "torch.rrelu($T, 0.1, 0.3, True)",
    "torch.manual_seed(1)",
    "torch.set_grad_enabled(True)",
    "uninitialized(Tensor)",
    "fork(self.forward, $T)",
    "torch.wait($T)",
    R"(ops.profiler._record_function_enter_new("epikv-canary", None))",
    "ops.aten._get_tracing_state()",
    "ops.aten.resize_($T, [9999])",
    "ops.aten.as_strided($T, [9], [9], 9999)",
    "ops.aten.set_($T)",
    R"(torch.getattr(self, "forward"))",
    R"(ops.prim.AutogradAnyNonZero($T))",
    "ops.inductor._mm_plus_mm($T, $T, $T, $T)",
    "ops.quantized.linear($T)",
};
// By which code would run that nobody calls.
constexpr absl::string_view kMethods[] = {
    "  def __setstate__(self, state: Tensor) -> NoneType:\n    return None",
    "  def other(self) -> NoneType:\n    _9 = torch.rand([2])\n    return None",
    "def free(x: Tensor=torch.rand([2])) -> Tensor:\n  return x",
    "_c9 = torch.rand([2])",
};

// Code, changed by lines or in the name of what a line calls.
std::string ChangeCode(absl::string_view code, std::mt19937& draw) {
  std::vector<std::string> lines = absl::StrSplit(code, '\n');
  auto below = [&](size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(draw); };
  const size_t at = below(lines.size());
  const std::string line = lines[at];
  const std::string indent(std::min(line.find_first_not_of(' '), line.size()), ' ');
  constexpr absl::string_view kTensors[] = {"x", "input", "weight", "token_ids"};
  const std::string forbidden = absl::StrReplaceAll(kForbidden[below(std::size(kForbidden))],
                                                    {{"$T", kTensors[below(std::size(kTensors))]}});
  switch (below(7)) {
    case 0:
      lines.insert(lines.begin() + at, absl::StrCat(indent, "_99 = ", forbidden));
      break;
    case 1:
      lines.insert(lines.begin() + at,
                   absl::StrCat(indent, "if annotate(bool, False):\n", indent,
                                "  _98 = ", forbidden, "\n", indent, "else:\n", indent, "  pass"));
      break;
    case 2:
      lines.insert(lines.begin() + at, std::string(kMethods[below(std::size(kMethods))]));
      break;
    case 3: {  // another function
      const size_t call = line.find("torch.");
      const size_t end = call == std::string::npos ? call : line.find('(', call);
      if (end == std::string::npos) break;
      const std::string name = forbidden.substr(0, forbidden.find('('));
      lines[at] = absl::StrCat(line.substr(0, call), name, line.substr(end));
      break;
    }
    case 4:
      lines.insert(lines.begin() + at, line);
      break;
    case 5:
      lines.erase(lines.begin() + at);
      break;
    default:
      std::swap(lines[at], lines[below(lines.size())]);
  }
  return absl::StrJoin(lines, "\n");
}

}  // namespace
}  // namespace epikv

extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned int seed) {
  if (seed % 4 == 0) return LLVMFuzzerMutate(data, size, max_size);
  try {
    epikv::Records records = epikv::ReadArchive({reinterpret_cast<const char*>(data), size});
    if (records.empty()) return LLVMFuzzerMutate(data, size, max_size);
    auto& [name, record] = records[seed / 4 % records.size()];
    std::mt19937 draw(seed);
    if (absl::EndsWith(name, ".py") && draw() % 4 != 0) {
      record = epikv::ChangeCode(record, draw);
    } else {
      const size_t room = record.size() + 64;
      std::string changed = record;
      changed.resize(room);
      changed.resize(
          LLVMFuzzerMutate(reinterpret_cast<uint8_t*>(changed.data()), record.size(), room));
      record = std::move(changed);
    }
    const std::string bytes = epikv::WriteArchive(records);
    if (bytes.size() <= max_size) {
      std::memcpy(data, bytes.data(), bytes.size());
      return bytes.size();
    }
  } catch (const std::exception&) {  // no archive any more
  }
  return LLVMFuzzerMutate(data, size, max_size);
}
