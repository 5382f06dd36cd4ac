#include "server/packets/packet_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <functional>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/random/random.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "server/base/sha256.h"

namespace epikv {
namespace {

constexpr absl::string_view kMagic = "epikvKV1", kMagicOfAll = "epikvKV", kSuffix = ".packet";
constexpr absl::string_view kIdPrefix = "sha256:";
constexpr size_t kHeadStart = 16;

std::string LittleEndian(uint64_t value) {
  std::string bytes(8, '\0');
  for (size_t i = 0; i < 8; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  return bytes;
}
uint64_t LittleEndian(absl::string_view bytes) {
  uint64_t value = 0;
  for (size_t i = 0; i < 8; ++i) value |= uint64_t{static_cast<unsigned char>(bytes[i])} << (8 * i);
  return value;
}

absl::Status SystemError(absl::string_view doing, const std::string& path) {
  const int error = errno;
  const bool full = error == ENOSPC || error == EDQUOT || error == EFBIG;
  return absl::Status(error == ENOENT ? absl::StatusCode::kNotFound
                      : full          ? absl::StatusCode::kResourceExhausted
                                      : absl::StatusCode::kUnavailable,
                      absl::StrCat("packet: ", doing, " '", path, "': ", std::strerror(error)));
}

absl::Status Damaged(const std::string& id, absl::string_view what) {
  return absl::DataLossError(absl::StrCat("packet '", id, "' is damaged: ", what));
}

// All of a file before its rows.
std::string Preamble(const v1::PacketHead& head) {
  const std::string bytes = head.SerializeAsString();
  return absl::StrCat(kMagic, LittleEndian(bytes.size()), bytes);
}

absl::string_view KeysOf(const Packet& packet) {
  return {packet.keys.get(), static_cast<size_t>(packet.key_bytes())};
}
absl::string_view ValuesOf(const Packet& packet) {
  return {packet.values.get(), static_cast<size_t>(packet.value_bytes())};
}

absl::Status OfAnotherVersion(const std::string& id) {
  return absl::FailedPreconditionError(
      absl::StrCat("packet '", id, "' was written by another version of epikv"));
}

// The one that its head says; none: of another version.
std::optional<KvFormat> FormatOf(const v1::PacketHead& head) {
  for (const DType model : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const KvDType stored : {KvDType::kModel, KvDType::kInt8}) {
      const KvFormat format{.model = model, .stored = stored};
      if (DTypeName(model) == head.dtype() && format.name() == head.kv_format()) return format;
    }
  }
  return std::nullopt;
}

// A packet without rows, as its head has it; or what is wrong with the head. Files are an
// operator's, but what they say is not believed.
absl::StatusOr<std::unique_ptr<Packet>> EmptyPacket(const std::string& id,
                                                    const v1::PacketHead& head) {
  constexpr int64_t kMost = 1 << 13, kMostLanes = 1 << 16;  // so that no product below overflows
  const std::optional<KvFormat> format = FormatOf(head);
  if (!format.has_value()) return OfAnotherVersion(id);
  auto packet = std::make_unique<Packet>();
  packet->format = *format;
  packet->num_layers = head.num_layers();
  packet->num_kv_heads = head.num_kv_heads();
  packet->key_width = head.key_width();
  packet->value_width = head.value_width();
  packet->turned = head.turned();
  packet->tokens = {head.tokens().begin(), head.tokens().end()};
  for (const int64_t count :
       {packet->num_layers, packet->num_kv_heads, packet->key_width, packet->value_width}) {
    if (count < 1 || count > kMost) return Damaged(id, "its head has impossible sizes");
  }
  const int64_t tables = head.tables_size();
  if (packet->num_lanes() > kMostLanes || tables < 1 ||
      (tables > 1 && tables != packet->num_layers && tables != packet->num_lanes())) {
    return Damaged(id, "its head has impossible sizes");
  }
  for (const v1::PacketHead::Table& table : head.tables()) {
    Packet::Table& to = packet->tables.emplace_back();
    to.index = {table.index().begin(), table.index().end()};
    to.position = {table.position().begin(), table.position().end()};
    const bool ascending = std::adjacent_find(to.index.begin(), to.index.end(),
                                              std::greater_equal<>()) == to.index.end();
    const bool inside =
        to.index.empty() || (to.index.front() >= 0 && to.index.back() < packet->num_tokens());
    const bool placed = std::all_of(to.position.begin(), to.position.end(),
                                    [](int32_t p) { return p >= 0 && p < (1 << 28); });
    if (!ascending || !inside || !placed || to.index.size() != to.position.size()) {
      return Damaged(id, "its tables are no tokens of its own");
    }
  }
  return packet;
}

// An open file, read from its beginning.
class Reader {
 public:
  static absl::StatusOr<Reader> Open(const std::string& folder, const std::string& id) {
    const std::string path = PacketPath(folder, id);
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (file < 0) return SystemError("cannot open", path);
    Reader reader(path, id, file);
    struct stat facts = {};
    if (fstat(file, &facts) != 0) return SystemError("cannot read", path);
    if (!S_ISREG(facts.st_mode)) return Damaged(id, "it is not a regular file");
    reader.left_ = facts.st_size;
    return reader;
  }
  Reader(Reader&& other) noexcept
      : path_(other.path_),
        id_(other.id_),
        file_(std::exchange(other.file_, -1)),
        left_(other.left_),
        digest_(std::move(other.digest_)) {}
  Reader& operator=(Reader&&) = delete;
  ~Reader() {
    if (file_ >= 0) close(file_);
  }

  int64_t left() const { return left_; }

  absl::Status Read(char* to, int64_t bytes) {
    if (bytes > left_) return Damaged(id_, "it is cut short");
    left_ -= bytes;
    for (int64_t done = 0; done < bytes;) {
      const ssize_t got = read(file_, to + done, bytes - done);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) return SystemError("cannot read", path_);
      if (got == 0) return Damaged(id_, "it is cut short");
      done += got;
    }
    digest_.Add({to, static_cast<size_t>(bytes)});
    return absl::OkStatus();
  }

  absl::StatusOr<v1::PacketHead> ReadHead() {
    std::string start(kHeadStart, '\0');
    if (absl::Status status = Read(start.data(), kHeadStart); !status.ok()) return status;
    if (!absl::StartsWith(start, kMagic)) {
      if (!absl::StartsWith(start, kMagicOfAll)) return Damaged(id_, "it is no packet");
      return OfAnotherVersion(id_);
    }
    const uint64_t bytes = LittleEndian(absl::string_view(start).substr(kMagic.size()));
    if (bytes > static_cast<uint64_t>(left_) || bytes > INT32_MAX) {
      return Damaged(id_, "it is cut short");
    }
    std::string text(bytes, '\0');
    if (absl::Status status = Read(text.data(), std::ssize(text)); !status.ok()) return status;
    v1::PacketHead head;
    if (!head.ParseFromString(text)) return Damaged(id_, "its head is no message");
    return head;
  }

  // Of all that was read.
  std::string Digest() { return digest_.Name(); }

 private:
  Reader(std::string path, std::string id, int file)
      : path_(std::move(path)), id_(std::move(id)), file_(file) {}

  const std::string path_, id_;
  int file_;
  int64_t left_ = 0;
  Sha256 digest_;
};

}  // namespace

NamedPacket NamePacket(v1::PacketHead head, std::shared_ptr<const Packet> packet) {
  head.set_kv_format(std::string(packet->format.name()));
  head.set_num_layers(packet->num_layers);
  head.set_num_kv_heads(packet->num_kv_heads);
  head.set_key_width(packet->key_width);
  head.set_value_width(packet->value_width);
  head.set_turned(packet->turned);
  head.mutable_tokens()->Assign(packet->tokens.begin(), packet->tokens.end());
  head.clear_tables();
  for (const Packet::Table& table : packet->tables) {
    v1::PacketHead::Table& to = *head.add_tables();
    to.mutable_index()->Assign(table.index.begin(), table.index.end());
    to.mutable_position()->Assign(table.position.begin(), table.position.end());
  }
  Sha256 digest;
  digest.Add(Preamble(head));
  digest.Add(KeysOf(*packet));
  digest.Add(ValuesOf(*packet));
  return {.id = digest.Name(), .head = std::move(head), .packet = std::move(packet)};
}

absl::StatusOr<int64_t> PacketBytes(const std::string& id, const v1::PacketHead& head) {
  const absl::StatusOr<std::unique_ptr<Packet>> packet = EmptyPacket(id, head);
  if (!packet.ok()) return packet.status();
  return (*packet)->bytes();
}

std::string PacketPath(const std::string& folder, const std::string& id) {
  return absl::StrCat(folder, "/", absl::StripPrefix(id, kIdPrefix), kSuffix);
}

std::string PacketIdOf(const std::string& file_name) {
  absl::string_view digest = file_name;
  if (!absl::ConsumeSuffix(&digest, kSuffix) || digest.size() != 64) return "";
  return absl::StrCat(kIdPrefix, digest);
}

// Others see it once it is whole and on the disk.
absl::Status WritePacketFile(const std::string& folder, const NamedPacket& packet) {
  const std::string path = PacketPath(folder, packet.id);
  const std::string unnamed =
      absl::StrCat(folder, "/.", absl::Hex(absl::Uniform<uint64_t>(absl::BitGen())), kSuffix);
  const int file = open(unnamed.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) return SystemError("cannot open", unnamed);
  absl::Cleanup remove = [&] { unlink(unnamed.c_str()); };
  absl::Cleanup shut = [file] { close(file); };
  const std::string preamble = Preamble(packet.head);
  for (absl::string_view part :
       {absl::string_view(preamble), KeysOf(*packet.packet), ValuesOf(*packet.packet)}) {
    while (!part.empty()) {
      const ssize_t written = write(file, part.data(), part.size());
      if (written < 0 && errno == EINTR) continue;
      if (written == 0) errno = ENOSPC;
      if (written <= 0) return SystemError("cannot write", unnamed);
      part.remove_prefix(static_cast<size_t>(written));
    }
  }
  if (fsync(file) != 0) return SystemError("cannot sync", unnamed);
  if (rename(unnamed.c_str(), path.c_str()) != 0) return SystemError("cannot rename to", path);
  std::move(remove).Cancel();
  absl::Cleanup take_back = [&] { unlink(path.c_str()); };
  const int at = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (at < 0) return SystemError("cannot open", folder);
  absl::Cleanup shut_folder = [at] { close(at); };
  if (fsync(at) != 0) return SystemError("cannot sync", folder);
  std::move(take_back).Cancel();
  return absl::OkStatus();
}

absl::StatusOr<v1::PacketHead> ReadPacketHead(const std::string& folder, const std::string& id) {
  absl::StatusOr<Reader> reader = Reader::Open(folder, id);
  if (!reader.ok()) return reader.status();
  return reader->ReadHead();
}

absl::StatusOr<NamedPacket> ReadPacketFile(const std::string& folder, const std::string& id) {
  absl::StatusOr<Reader> reader = Reader::Open(folder, id);
  if (!reader.ok()) return reader.status();
  absl::StatusOr<v1::PacketHead> head = reader->ReadHead();
  if (!head.ok()) return head.status();
  absl::StatusOr<std::unique_ptr<Packet>> packet = EmptyPacket(id, *head);
  if (!packet.ok()) return packet.status();
  Packet& to = **packet;
  // Before memory is taken: widths are bounded, and rows by what the head has of tables.
  if (to.key_bytes() + to.value_bytes() != reader->left()) {
    return Damaged(id, "it has not the rows that its head says");
  }
  to.keys = std::make_unique_for_overwrite<char[]>(to.key_bytes());
  to.values = std::make_unique_for_overwrite<char[]>(to.value_bytes());
  for (absl::Status status : {reader->Read(to.keys.get(), to.key_bytes()),
                              reader->Read(to.values.get(), to.value_bytes())}) {
    if (!status.ok()) return status;
  }
  if (reader->Digest() != id) return Damaged(id, "its digest is another");
  return NamedPacket{.id = id, .head = *std::move(head), .packet = *std::move(packet)};
}

}  // namespace epikv
