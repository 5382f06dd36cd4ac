#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace epikv {

// Where rows lie that were moved out of the KV pool: memory, or a file. One sequence's. Engine
// thread.
class TierStore {
 public:
  virtual ~TierStore() = default;
  // Requires: within its bytes. Not OK: what the system says. What had been there may then be lost.
  virtual absl::Status Write(int64_t offset, const void* data, int64_t bytes) = 0;
  virtual absl::Status Read(int64_t offset, void* data, int64_t bytes) const = 0;
};

// Of so many bytes, which read as zeros. folder: where a file without a name is made, all of whose
// blocks are taken at once, so that none is missing later; it goes with the store, and with the
// process however that ends. Empty: memory, which is taken as it is written.
absl::StatusOr<std::unique_ptr<TierStore>> OpenTierStore(const std::string& folder, int64_t bytes);

// Opens one for a sequence.
using TierOpener = std::function<absl::StatusOr<std::unique_ptr<TierStore>>(int64_t bytes)>;
inline TierOpener TiersIn(std::string folder) {
  return [folder = std::move(folder)](int64_t bytes) { return OpenTierStore(folder, bytes); };
}

}  // namespace epikv
