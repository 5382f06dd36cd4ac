#pragma once

#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "runtime/base/machine.h"
#include "runtime/request/request.h"
#include "server/base/log.h"
#include "server/base/task_thread.h"
#include "server/metrics/metrics.h"
#include "server/models/models.h"
#include "server/sessions/episodes.h"

namespace epikv {

// True positions as long as the context has them; then those of what is kept.
PositionMode SessionPositions(const ServedModel& model, int64_t tokens);

struct SessionsOptions {
  int64_t bytes = 0;                    // of all; 0: there are none
  absl::Duration ttl = absl::Hours(1);  // after which one that nobody used is forgotten
};

// Long conversations whose past is kept as episodes (EpiCache, arXiv 2509.17396): the past is
// clustered, and for each cluster there is a packet of all of it, evicted to a budget by what that
// cluster's passages attend to. A request goes on from the episode that its question is nearest to.
// A session is a cache: a request brings its whole prompt, and what has been forgotten is read
// anew. Thread-safe.
class Sessions {
 public:
  // models: whose engines keep episodes up to date, as requests of low priority of the session's
  // tenant. log: is told where that fails. Both outlive this.
  Sessions(const SessionsOptions& options, const Models& models, const Log& log);
  ~Sessions();

  bool any() const { return options_.bytes > 0; }

  // Whose conversation, and how it is kept.
  struct Name {
    std::string tenant, id, model;
    int64_t budget = 0;    // tokens that an episode keeps of each layer and KV head, on average
    int64_t episodes = 4;  // at most
    auto operator<=>(const Name&) const = default;
  };

  // Whether all its episodes can be kept at once.
  bool HasRoomFor(const Name& name, const ServedModel& model) const;

  // What a request with this prompt goes on from. Null: from nothing. tokens: that it stands for.
  struct Start {
    std::shared_ptr<const Packet> episode;
    int64_t tokens = 0;
  };
  // question: its embedding.
  Start Find(const Name& name, const std::weak_ptr<const ServedModel>& model,
             absl::Span<const int32_t> prompt, const Embedding& question);

  // A request with this prompt has ended. Where that is beyond the episodes, they are brought up to
  // it, in the background. For the engine's thread too.
  void Extend(const Name& name, const std::weak_ptr<const ServedModel>& model,
              std::vector<int32_t> tokens);

  Metrics::SessionGauges usage() const;

 private:
  struct Kept {
    Embedding centroid;
    std::shared_ptr<const Packet> packet;
  };
  struct Session {
    std::weak_ptr<const ServedModel> model;
    std::vector<int32_t> tokens;  // that all of its episodes stand for
    std::vector<Kept> episodes;
    absl::Time used;
    int64_t bytes() const;
    // The episode whose centroid is nearest; null: there is none.
    std::shared_ptr<const Packet> Nearest(const Embedding& to) const;
  };

  // Brings a session's episodes up to its conversation: so many tokens of it, not its newest.
  // Cancelled: the server stops, or the model has gone out of service.
  absl::Status Update(const Name& name, const ModelPtr& model, absl::Span<const int32_t> tokens);
  // The session as it is, where it stands for the beginning of these tokens; else an empty one.
  // Makes room for its new episodes beside it, `bytes` at most, or in place of it.
  Session Take(const Name& name, const ModelPtr& model, absl::Span<const int32_t> tokens,
               int64_t bytes);
  absl::StatusOr<std::shared_ptr<const Packet>> Build(const Name& name, const ModelPtr& model,
                                                      const std::shared_ptr<const Packet>& from,
                                                      absl::Span<const int32_t> tokens,
                                                      std::vector<int64_t> query);
  void Sweep() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  int64_t bytes() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);  // with those that are being made

  const SessionsOptions options_;
  const Models& models_;
  const Log& log_;
  const MemorySetAside set_aside_;
  mutable absl::Mutex mu_;
  std::map<Name, Session> sessions_ ABSL_GUARDED_BY(mu_);
  int64_t making_ ABSL_GUARDED_BY(mu_) = 0;  // bytes that new episodes can take
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::weak_ptr<const ServedModel> building_ ABSL_GUARDED_BY(mu_);  // whose engine works for one
  std::string building_id_ ABSL_GUARDED_BY(mu_);                    // of its request
  int64_t done_ ABSL_GUARDED_BY(mu_) = 0, failed_ ABSL_GUARDED_BY(mu_) = 0;  // updates
  LineLimit failures_told_{1};
  TaskThread updating_;  // last: its tasks use all of this
};

}  // namespace epikv
