#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "runtime/base/machine.h"
#include "server/metrics/metrics.h"
#include "server/packets/packet_file.h"

namespace epikv {

struct PacketStoreOptions {
  int64_t bytes = 0;         // in memory; 0: there are no packets
  std::string folder;        // where they are kept, too; empty: in memory alone
  int64_t folder_bytes = 0;  // of its files
  int64_t tenant_bytes = 0;  // of one tenant's packets, wherever they are; 0: no limit of its own
};

// The packets of all models and tenants. Memory holds them all; or, where there is a folder, those
// used last: that and the files are shared with other daemons, which may add and delete.
// Thread-safe. What touches files blocks.
class PacketStore {
 public:
  PacketStore() : PacketStore(PacketStoreOptions()) {}  // there are no packets
  // FAILED_PRECONDITION: the folder cannot be used.
  static absl::StatusOr<std::unique_ptr<PacketStore>> Open(PacketStoreOptions options);

  bool any() const { return options_.bytes > 0; }

  // Memory for a packet that is to come, of so many bytes at most, until it is put or this goes.
  class Room {
   public:
    Room(PacketStore* store, int64_t bytes) : store_(store), bytes_(bytes) {}
    Room(Room&& other) noexcept
        : store_(std::exchange(other.store_, nullptr)), bytes_(other.bytes_) {}
    Room& operator=(Room&& other) noexcept {
      std::swap(store_, other.store_);
      std::swap(bytes_, other.bytes_);
      return *this;
    }
    ~Room() { Free(); }

   private:
    friend class PacketStore;
    void Free() {
      if (store_ != nullptr) std::exchange(store_, nullptr)->Release(bytes_);
    }
    // By who has the store's lock: what it was for takes its place at once.
    void FreeLocked() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      if (store_ != nullptr) std::exchange(store_, nullptr)->reserved_ -= bytes_;
    }
    PacketStore* store_;
    int64_t bytes_;
  };
  // RESOURCE_EXHAUSTED (PACKETS_FULL): there is none.
  absl::StatusOr<Room> Reserve(int64_t bytes);

  struct Facts {
    std::string id, model, tenant;
    int64_t tokens = 0;
    double kept_tokens = 0;
    bool soft_tokens = false;
    int64_t bytes = 0;
    absl::Time created;
  };
  // Keeps a packet, and gives its room back. RESOURCE_EXHAUSTED (PACKETS_FULL): the tenant, or the
  // folder, has as much as it may; or the disk is full. UNAVAILABLE: the disk fails. Nothing is
  // kept then.
  absl::StatusOr<Facts> Put(v1::PacketHead head, std::shared_ptr<const Packet> packet, Room room);

  // A tenant's packet; null: it may be in a file (Load). NOT_FOUND: there is no such id. model: of
  // whom it has to be (what HeadOf says); FAILED_PRECONDITION: it is another's.
  absl::StatusOr<std::shared_ptr<const Packet>> Find(absl::string_view tenant,
                                                     const std::string& id,
                                                     const v1::PacketHead& model);
  // The same, from a file if need be. As well RESOURCE_EXHAUSTED (PACKETS_FULL): memory is full of
  // packets that requests hold; and what ReadPacketFile says.
  absl::StatusOr<std::shared_ptr<const Packet>> Load(absl::string_view tenant,
                                                     const std::string& id,
                                                     const v1::PacketHead& model);

  // A tenant's, the newest first; model: of one name, or of all.
  std::vector<Facts> List(absl::string_view tenant, absl::string_view model);
  // NOT_FOUND: there is no such id. UNAVAILABLE: its file cannot be deleted, and stays.
  absl::Status Delete(absl::string_view tenant, const std::string& id);

  Metrics::PacketGauges usage() const;

 private:
  struct Entry {
    v1::PacketHead head;  // without tokens and tables
    Facts facts;
    std::shared_ptr<const Packet> packet;  // null: in its file alone
    int64_t used = 0;                      // when, in uses of any
  };

  explicit PacketStore(PacketStoreOptions options)
      : options_(std::move(options)), set_aside_(options_.bytes) {}
  void Release(int64_t bytes) {
    absl::MutexLock lock(&mu_);
    reserved_ -= bytes;
  }
  // Files that others have made or deleted.
  absl::Status LookAtFolder();
  // Whether its file is, of one that has been put.
  bool IsThere(const std::string& id) const;
  // Forgets what lies in files until so many bytes are free; false: they cannot be.
  bool MakeRoom(int64_t bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  absl::Status CheckLimits(const std::string& tenant, int64_t bytes) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Entry* Of(absl::string_view tenant, const std::string& id) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Drop(std::map<std::string, Entry>::iterator entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const PacketStoreOptions options_;
  const MemorySetAside set_aside_;  // which KV pools have less
  absl::Mutex files_;               // who reads or writes them, one at a time; before mu_
  mutable absl::Mutex mu_;
  std::map<std::string, Entry> entries_ ABSL_GUARDED_BY(mu_);  // by id
  int64_t in_memory_ ABSL_GUARDED_BY(mu_) = 0;                 // bytes of packets
  int64_t reserved_ ABSL_GUARDED_BY(mu_) = 0;                  // of those to come
  int64_t kept_ ABSL_GUARDED_BY(mu_) = 0;                      // of all, wherever they are
  int64_t uses_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace epikv
