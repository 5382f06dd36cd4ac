#include "runtime/base/checksums.h"

#include <caffe2/serialize/inline_container.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <unordered_map>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace epikv {
namespace {

// The ZIP format, APPNOTE.TXT 4.3: an archive ends with its directory and a record of where that
// lies, large ones with a second such record of wider numbers before it.
constexpr absl::string_view kEndMark("PK\5\6", 4), kWideEndMark("PK\6\6", 4),
    kWideLocatorMark("PK\6\7", 4), kEntryMark("PK\1\2", 4);
constexpr int64_t kEndBytes = 22, kWideEndBytes = 56, kWideLocatorBytes = 20, kEntryBytes = 46;
constexpr int64_t kLongestComment = 65535;

// The little-endian number of `bytes` bytes at `offset`, which must lie inside.
uint64_t Number(absl::string_view data, size_t offset, int bytes) {
  uint64_t number = 0;
  for (int i = bytes; i-- > 0;) number = number << 8 | static_cast<uint8_t>(data[offset + i]);
  return number;
}

absl::Status NoDirectory() { return absl::DataLossError("its directory of records is damaged"); }

// `bytes` bytes at `offset`.
absl::StatusOr<std::string> ReadAt(std::ifstream& file, int64_t file_bytes, uint64_t offset,
                                   uint64_t bytes) {
  const auto end = static_cast<uint64_t>(file_bytes);
  if (offset > end || bytes > end - offset) return NoDirectory();
  std::string data(bytes, '\0');
  file.seekg(static_cast<std::streamoff>(offset));
  if (!file.read(data.data(), static_cast<std::streamsize>(bytes))) return NoDirectory();
  return data;
}

absl::StatusOr<std::string> ReadDirectory(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const int64_t file_bytes = file ? static_cast<int64_t>(file.tellg()) : 0;
  const int64_t tail_bytes =
      std::min(file_bytes, kEndBytes + kLongestComment + kWideEndBytes + kWideLocatorBytes);
  absl::StatusOr<std::string> tail =
      ReadAt(file, file_bytes, static_cast<uint64_t>(file_bytes - tail_bytes), tail_bytes);
  if (!tail.ok()) return tail.status();

  const size_t end = tail->rfind(kEndMark.data(), std::string::npos, kEndMark.size());
  if (end == std::string::npos || end + kEndBytes > tail->size()) return NoDirectory();
  uint64_t bytes = Number(*tail, end + 12, 4), offset = Number(*tail, end + 16, 4);
  const absl::string_view before = absl::string_view(*tail).substr(0, end);
  const bool wide = before.size() >= kWideEndBytes + kWideLocatorBytes &&
                    absl::StartsWith(before.substr(end - kWideLocatorBytes), kWideLocatorMark);
  if (wide) {
    const size_t wide_end = end - kWideLocatorBytes - kWideEndBytes;
    if (!absl::StartsWith(before.substr(wide_end), kWideEndMark)) return NoDirectory();
    bytes = Number(before, wide_end + 40, 8);
    offset = Number(before, wide_end + 48, 8);
  }
  return ReadAt(file, file_bytes, offset, bytes);
}

}  // namespace

absl::StatusOr<Checksums> ReadChecksums(const std::string& path) {
  const absl::StatusOr<std::string> directory = ReadDirectory(path);
  if (!directory.ok()) return directory.status();
  Checksums checksums;
  absl::string_view rest = *directory;
  while (!rest.empty()) {
    if (rest.size() < kEntryBytes || !absl::StartsWith(rest, kEntryMark)) return NoDirectory();
    const size_t name_bytes = Number(rest, 28, 2);
    const size_t entry_bytes = kEntryBytes + name_bytes + Number(rest, 30, 2) + Number(rest, 32, 2);
    if (rest.size() < entry_bytes) return NoDirectory();
    const absl::string_view name = rest.substr(kEntryBytes, name_bytes);
    checksums.emplace(name.substr(name.find('/') + 1), Number(rest, 16, 4));
    rest.remove_prefix(entry_bytes);
  }
  return checksums;
}

absl::Status VerifyChecksums(caffe2::serialize::PyTorchStreamReader& reader,
                             const std::string& path) {
  const absl::StatusOr<Checksums> checksums = ReadChecksums(path);
  if (!checksums.ok()) return checksums.status();
  for (const std::string& name : reader.getAllRecords()) {
    const auto [data, bytes] = reader.getRecord(name);
    const auto found = checksums->find(name);
    const uint64_t crc = crc32_z(0, static_cast<const Bytef*>(data.get()), bytes);
    if (found == checksums->end() || found->second != crc) {
      return absl::DataLossError(absl::StrCat("its record '", name, "' has a wrong checksum"));
    }
  }
  return absl::OkStatus();
}

}  // namespace epikv
