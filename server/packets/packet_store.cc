#include "server/packets/packet_store.h"

#include <dirent.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "runtime/base/reason.h"
#include "server/base/errors.h"
#include "server/models/model_files.h"

namespace epikv {
namespace {

// After which some packets may be free again, or deleted.
constexpr absl::Duration kRetryDelay = absl::Seconds(5);
// Of a file that has no name yet and that nobody can be writing any more.
constexpr absl::Duration kAbandoned = absl::Hours(1);

absl::Status Full(absl::string_view what) {
  return WithRetryAfter(WithReason(absl::ResourceExhaustedError(what), kPacketsFull), kRetryDelay);
}

absl::Status NoSuch(const std::string& id) {
  return absl::NotFoundError(absl::StrCat("there is no packet '", id, "'"));
}

PacketStore::Facts FactsOf(const std::string& id, const v1::PacketHead& head, int64_t bytes,
                           absl::Time created) {
  int64_t rows = 0;
  for (const v1::PacketHead::Table& table : head.tables()) rows += table.index_size();
  return {.id = id,
          .model = head.model(),
          .tenant = head.tenant(),
          .tokens = head.tokens_size(),
          .kept_tokens = static_cast<double>(rows) / std::max(1, head.tables_size()),
          .soft_tokens = head.soft_tokens(),
          .bytes = bytes,
          .created = created};
}

v1::PacketHead WithoutTokens(v1::PacketHead head) {
  head.clear_tokens();
  head.clear_tables();
  return head;
}

absl::Status CheckModel(const std::string& id, const v1::PacketHead& of,
                        const v1::PacketHead& model) {
  if (of.weights() == model.weights() && of.dtype() == model.dtype() &&
      of.quantization() == model.quantization() && of.kv_format() == model.kv_format()) {
    return absl::OkStatus();
  }
  return WithReason(
      absl::FailedPreconditionError(absl::StrCat(
          "packet '", id, "' is of model '", of.model(),
          "' with other weights, or of another dtype or kv_dtype, than the model that is asked")),
      kPacketModel);
}

}  // namespace

absl::StatusOr<std::unique_ptr<PacketStore>> PacketStore::Open(PacketStoreOptions options) {
  std::unique_ptr<PacketStore> store(new PacketStore(std::move(options)));
  const std::string& folder = store->options_.folder;
  if (folder.empty() || !store->any()) return store;
  if (mkdir(folder.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::FailedPreconditionError(
        absl::StrCat("--packet_dir: cannot make '", folder, "': ", std::strerror(errno)));
  }
  if (access(folder.c_str(), R_OK | W_OK | X_OK) != 0) {
    return absl::FailedPreconditionError(
        absl::StrCat("--packet_dir: cannot use '", folder, "': ", std::strerror(errno)));
  }
  if (absl::Status status = store->LookAtFolder(); !status.ok()) {
    return absl::FailedPreconditionError(absl::StrCat("--packet_dir: ", status.message()));
  }
  return store;
}

absl::Status PacketStore::LookAtFolder() {
  if (options_.folder.empty()) return absl::OkStatus();
  absl::MutexLock files(&files_);
  DIR* const folder = opendir(options_.folder.c_str());
  if (folder == nullptr) {
    return absl::UnavailableError(
        absl::StrCat("cannot read '", options_.folder, "': ", std::strerror(errno)));
  }
  std::set<std::string> there;
  while (const dirent* const file = readdir(folder)) {
    const std::string name = file->d_name;
    const std::string path = absl::StrCat(options_.folder, "/", name);
    struct stat facts = {};
    if (lstat(path.c_str(), &facts) != 0 || !S_ISREG(facts.st_mode)) continue;
    const absl::Time written = absl::TimeFromTimespec(facts.st_mtim);
    if (absl::StartsWith(name, ".") && absl::EndsWith(name, ".packet") &&
        absl::Now() - written > kAbandoned) {
      unlink(path.c_str());  // a writer was killed
      continue;
    }
    const std::string id = PacketIdOf(name);
    if (id.empty()) continue;
    there.insert(id);
    {
      absl::MutexLock lock(&mu_);
      if (entries_.contains(id)) continue;
    }
    absl::StatusOr<v1::PacketHead> head = ReadPacketHead(options_.folder, id);
    if (!head.ok()) continue;  // who asks for it will be told
    const absl::StatusOr<int64_t> bytes = PacketBytes(id, *head);
    if (!bytes.ok()) continue;
    absl::MutexLock lock(&mu_);
    Entry& entry = entries_[id];
    entry.facts = FactsOf(id, *head, *bytes, written);
    entry.head = WithoutTokens(*std::move(head));
    kept_ += entry.facts.bytes;
  }
  closedir(folder);
  absl::MutexLock lock(&mu_);
  for (auto entry = entries_.begin(); entry != entries_.end();) {
    const auto next = std::next(entry);
    if (!there.contains(entry->first)) Drop(entry);
    entry = next;
  }
  return absl::OkStatus();
}

void PacketStore::Drop(std::map<std::string, Entry>::iterator entry) {
  if (entry->second.packet != nullptr) in_memory_ -= entry->second.packet->bytes();
  kept_ -= entry->second.facts.bytes;
  entries_.erase(entry);
}

bool PacketStore::IsThere(const std::string& id) const {
  struct stat facts = {};
  return options_.folder.empty() || lstat(PacketPath(options_.folder, id).c_str(), &facts) == 0;
}

bool PacketStore::MakeRoom(int64_t bytes) {
  while (in_memory_ + reserved_ + bytes > options_.bytes) {
    Entry* oldest = nullptr;
    for (auto& [id, entry] : entries_) {
      if (options_.folder.empty() || entry.packet == nullptr || entry.packet.use_count() > 1) {
        continue;
      }
      if (oldest == nullptr || entry.used < oldest->used) oldest = &entry;
    }
    if (oldest == nullptr) return false;
    in_memory_ -= oldest->packet->bytes();
    oldest->packet.reset();
  }
  return true;
}

absl::StatusOr<PacketStore::Room> PacketStore::Reserve(int64_t bytes) {
  absl::MutexLock lock(&mu_);
  if (!MakeRoom(bytes)) {
    return Full(absl::StrCat(
        "the packet can take up to ", bytes, " bytes, and of packet_bytes, ", options_.bytes, ", ",
        std::max<int64_t>(0, options_.bytes - in_memory_ - reserved_),
        " are free: delete some, or ask for fewer tokens or a smaller budget"));
  }
  reserved_ += bytes;
  return Room(this, bytes);
}

absl::Status PacketStore::CheckLimits(const std::string& tenant, int64_t bytes) const {
  int64_t own = 0;
  for (const auto& [id, entry] : entries_) {
    if (entry.facts.tenant == tenant) own += entry.facts.bytes;
  }
  if (options_.tenant_bytes > 0 && own + bytes > options_.tenant_bytes) {
    return Full(absl::StrCat("the packet takes ", bytes, " bytes, and your packets have ", own,
                             " of the ", options_.tenant_bytes,
                             " that a tenant may have: delete some"));
  }
  if (!options_.folder.empty() && kept_ + bytes > options_.folder_bytes) {
    return Full(absl::StrCat("the packet takes ", bytes, " bytes, and packet_dir has ", kept_,
                             " of the ", options_.folder_bytes, " that it may have: delete some"));
  }
  return absl::OkStatus();
}

absl::StatusOr<PacketStore::Facts> PacketStore::Put(v1::PacketHead head,
                                                    std::shared_ptr<const Packet> packet,
                                                    Room room) {
  NamedPacket named = NamePacket(std::move(head), std::move(packet));
  const int64_t bytes = named.packet->bytes();
  absl::MutexLock files(&files_);
  const bool is_there = IsThere(named.id);
  {
    absl::MutexLock lock(&mu_);
    Entry* const known = Of(named.head.tenant(), named.id);
    if (known != nullptr && is_there) {
      known->used = ++uses_;
      return known->facts;
    }
    if (known != nullptr) Drop(entries_.find(named.id));  // another daemon has deleted it
    absl::Status status = CheckLimits(named.head.tenant(), bytes);
    if (!status.ok()) return status;
  }
  if (!options_.folder.empty()) {
    absl::Status status = WritePacketFile(options_.folder, named);
    if (absl::IsResourceExhausted(status)) return Full(std::string(status.message()));
    if (!status.ok()) return status;
  }
  Entry entry{.facts = FactsOf(named.id, named.head, bytes, absl::Now()),
              .packet = std::move(named.packet)};
  entry.head = WithoutTokens(std::move(named.head));
  absl::MutexLock lock(&mu_);
  room.FreeLocked();
  entry.used = ++uses_;
  in_memory_ += bytes;
  kept_ += bytes;
  return entries_.insert_or_assign(named.id, std::move(entry)).first->second.facts;
}

PacketStore::Entry* PacketStore::Of(absl::string_view tenant, const std::string& id) {
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second.facts.tenant != tenant) return nullptr;
  return &found->second;
}

absl::StatusOr<std::shared_ptr<const Packet>> PacketStore::Find(absl::string_view tenant,
                                                                const std::string& id,
                                                                const v1::PacketHead& model) {
  if (!IsDigest(id)) return NoSuch(id);
  absl::MutexLock lock(&mu_);
  Entry* const entry = Of(tenant, id);
  if (entry == nullptr) {
    // Another daemon may have made it.
    if (options_.folder.empty() || entries_.contains(id)) return NoSuch(id);
    return nullptr;
  }
  absl::Status status = CheckModel(id, entry->head, model);
  if (!status.ok()) return status;
  entry->used = ++uses_;
  return entry->packet;
}

absl::StatusOr<std::shared_ptr<const Packet>> PacketStore::Load(absl::string_view tenant,
                                                                const std::string& id,
                                                                const v1::PacketHead& model) {
  absl::MutexLock files(&files_);
  absl::StatusOr<std::shared_ptr<const Packet>> known = Find(tenant, id, model);
  if (!known.ok() || *known != nullptr) return known;
  struct stat facts = {};
  if (lstat(PacketPath(options_.folder, id).c_str(), &facts) != 0) return NoSuch(id);
  // So that nobody learns of another's by how long it takes, or fills memory with his own mistakes.
  absl::StatusOr<v1::PacketHead> head = ReadPacketHead(options_.folder, id);
  if (!head.ok()) return head.status();
  if (head->tenant() != tenant) return NoSuch(id);
  if (absl::Status status = CheckModel(id, *head, model); !status.ok()) return status;
  const absl::StatusOr<int64_t> bytes = PacketBytes(id, *head);
  if (!bytes.ok()) return bytes.status();
  absl::StatusOr<Room> room = Reserve(*bytes);
  if (!room.ok()) return room.status();
  absl::StatusOr<NamedPacket> read = ReadPacketFile(options_.folder, id);
  if (!read.ok()) return read.status();
  absl::MutexLock lock(&mu_);
  room->FreeLocked();
  Entry& entry = entries_[id];
  if (entry.facts.id.empty()) kept_ += *bytes;  // another daemon's
  entry.facts = FactsOf(id, read->head, *bytes, absl::TimeFromTimespec(facts.st_mtim));
  entry.head = WithoutTokens(std::move(read->head));
  entry.packet = std::move(read->packet);
  entry.used = ++uses_;
  in_memory_ += entry.packet->bytes();
  return entry.packet;
}

std::vector<PacketStore::Facts> PacketStore::List(absl::string_view tenant,
                                                  absl::string_view model) {
  (void)LookAtFolder();  // what is known already can be told all the same
  std::vector<Facts> list;
  {
    absl::MutexLock lock(&mu_);
    for (const auto& [id, entry] : entries_) {
      if (entry.facts.tenant != tenant) continue;
      if (model.empty() || entry.facts.model == model) list.push_back(entry.facts);
    }
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const Facts& a, const Facts& b) { return a.created > b.created; });
  return list;
}

absl::Status PacketStore::Delete(absl::string_view tenant, const std::string& id) {
  if (absl::Status status = LookAtFolder(); !status.ok()) return status;
  absl::MutexLock files(&files_);
  {
    absl::MutexLock lock(&mu_);
    if (Of(tenant, id) == nullptr) return NoSuch(id);
  }
  if (!options_.folder.empty() && unlink(PacketPath(options_.folder, id).c_str()) != 0 &&
      errno != ENOENT) {
    return absl::UnavailableError(
        absl::StrCat("packet: cannot delete '", id, "': ", std::strerror(errno)));
  }
  absl::MutexLock lock(&mu_);
  if (const auto entry = entries_.find(id); entry != entries_.end()) Drop(entry);
  return absl::OkStatus();
}

Metrics::PacketGauges PacketStore::usage() const {
  absl::MutexLock lock(&mu_);
  return {.packets = std::ssize(entries_),
          .memory_bytes = in_memory_ + reserved_,
          .folder_bytes = options_.folder.empty() ? 0 : kept_};
}

}  // namespace epikv
