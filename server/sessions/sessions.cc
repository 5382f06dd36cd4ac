#include "server/sessions/sessions.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/cleanup/cleanup.h"
#include "absl/random/random.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "runtime/base/steady_time.h"

namespace epikv {
namespace {

// What is clustered: so many tokens of a conversation at a time. Its authors take four utterances.
constexpr int64_t kWindow = 128;
// Windows of a cluster that ask for it: those nearest to its centroid, in their order.
constexpr int64_t kMedoids = 4;
// Tokens beyond the episodes that a request may have to read before they are brought up to date.
constexpr int64_t kTail = 256;

// Waits for the packet that a request leaves.
class PacketSink final : public RequestSink {
 public:
  bool Ready() const override { return true; }
  void OnDelta(Delta) override {}
  void OnFinished(Finished finished) override {
    finished_ = std::move(finished);
    ended_.Notify();
  }
  Finished Await() {
    ended_.WaitForNotification();
    return std::move(finished_);
  }

 private:
  Finished finished_;
  absl::Notification ended_;
};

absl::Span<const int32_t> WindowOf(absl::Span<const int32_t> tokens, int64_t window) {
  return tokens.subspan(window * kWindow, kWindow);  // the last may be shorter
}

// Those windows of an episode that say best what it is about, in their order.
std::vector<int64_t> QueryOf(absl::Span<const int32_t> tokens, const Episode& episode) {
  std::vector<int64_t> asking = episode.windows;
  asking.resize(std::min(std::ssize(asking), kMedoids));
  std::sort(asking.begin(), asking.end());
  std::vector<int64_t> query;
  for (const int64_t window : asking) {
    const auto part = WindowOf(tokens, window);
    query.insert(query.end(), part.begin(), part.end());
  }
  return query;
}

// That a session's episodes can take: rows, which they are, and the conversation's tokens with
// each.
int64_t MostBytes(const Sessions::Name& name, const ServedModel& model, int64_t tokens) {
  const int64_t row = model.admission->kv_bytes_per_token() + model.lanes() * 8;
  const int64_t centroid = model.admission->manifest().hidden_size * 4;
  return name.episodes * (name.budget * row + tokens * 4 + centroid) + tokens * 4;
}

bool Begins(absl::Span<const int32_t> all, absl::Span<const int32_t> with) {
  return all.size() >= with.size() && all.first(with.size()) == with;
}

std::string NewId() {
  absl::BitGen random;
  return absl::StrCat("session:", absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16),
                      absl::Hex(absl::Uniform<uint64_t>(random), absl::kZeroPad16));
}

}  // namespace

PositionMode SessionPositions(const ServedModel& model, int64_t tokens) {
  const bool fits = tokens < model.admission->manifest().context_length;
  return fits ? PositionMode::kAbsolute : PositionMode::kCompact;
}

Sessions::Sessions(const SessionsOptions& options, const Models& models, const Log& log)
    : options_(options), models_(models), log_(log), set_aside_(options.bytes) {}

Sessions::~Sessions() {
  std::shared_ptr<const ServedModel> building;
  std::string id;
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
    building = building_.lock();
    id = building_id_;
  }
  if (building != nullptr) building->engine->Cancel(id, absl::CancelledError("the server stops"));
}

int64_t Sessions::Session::bytes() const {
  int64_t bytes = std::ssize(tokens) * static_cast<int64_t>(sizeof(int32_t));
  for (const Kept& kept : episodes) {
    bytes += kept.packet->bytes() + std::ssize(kept.centroid) * static_cast<int64_t>(sizeof(float));
  }
  return bytes;
}

std::shared_ptr<const Packet> Sessions::Session::Nearest(const Embedding& to) const {
  if (episodes.empty()) return nullptr;
  std::vector<Embedding> centroids;
  for (const Kept& kept : episodes) centroids.push_back(kept.centroid);
  return episodes[NearestEpisode(centroids, to)].packet;
}

int64_t Sessions::bytes() const {
  int64_t bytes = making_;
  for (const auto& [name, session] : sessions_) bytes += session.bytes();
  return bytes;
}

// Forgets those that nobody used for long, or whose model has gone.
void Sessions::Sweep() {
  const absl::Time now = SteadyNow();
  std::erase_if(sessions_, [&](const auto& entry) {
    return now - entry.second.used > options_.ttl || !models_.Serves(entry.second.model);
  });
}

bool Sessions::HasRoomFor(const Name& name, const ServedModel& model) const {
  return MostBytes(name, model, name.budget) <= options_.bytes;
}

Sessions::Start Sessions::Find(const Name& name, const std::weak_ptr<const ServedModel>& model,
                               absl::Span<const int32_t> prompt, const Embedding& question) {
  absl::MutexLock lock(&mu_);
  Sweep();
  const auto found = sessions_.find(name);
  if (found == sessions_.end()) return {};
  Session& session = found->second;
  if (!IsModel(session.model, model) || session.tokens.size() >= prompt.size() ||
      !Begins(prompt, session.tokens)) {
    return {};
  }
  session.used = SteadyNow();
  return {.episode = session.Nearest(question), .tokens = std::ssize(session.tokens)};
}

void Sessions::Extend(const Name& name, const std::weak_ptr<const ServedModel>& model,
                      std::vector<int32_t> tokens) {
  {
    absl::MutexLock lock(&mu_);
    Sweep();
    if (stopping_) return;
    const auto found = sessions_.find(name);
    const bool goes_on = found != sessions_.end() && Begins(tokens, found->second.tokens);
    const int64_t covered = goes_on ? std::ssize(found->second.tokens) : 0;
    if (std::ssize(tokens) <= name.budget || std::ssize(tokens) - covered <= kTail) return;
  }
  // One task a session waits at most: the next request brings all that has come since.
  const std::string owner = absl::StrCat(name.tenant.size(), ":", name.tenant, name.id);
  if (updating_.Waiting(owner) > 0) return;
  const int64_t size = std::ssize(tokens);
  updating_.Post(owner, size, [this, name, model, tokens = std::move(tokens)] {
    const ModelPtr live = model.lock();
    if (live == nullptr) return;
    const absl::Status status = Update(name, live, tokens);
    if (status.ok() || absl::IsCancelled(status)) return;
    {
      absl::MutexLock lock(&mu_);
      ++failed_;
    }
    if (failures_told_.Take(SteadyNow()).has_value()) {
      log_.Warn(absl::StrCat("episodes of a session were not made: ", status.message()));
    }
  });
}

absl::Status Sessions::Update(const Name& name, const ModelPtr& model,
                              absl::Span<const int32_t> tokens) {
  const int64_t chunk = model->admission->limits().prefill_chunk_tokens;
  // In whole blocks, so that each is scored behind its end; the newest tokens stay outside.
  tokens = tokens.first((std::ssize(tokens) - 1) / chunk * chunk);
  if (std::ssize(tokens) <= name.budget) return absl::OkStatus();
  std::vector<Embedding> windows;
  for (int64_t begin = 0; begin < std::ssize(tokens); begin += kWindow) {
    windows.push_back(model->embed(WindowOf(tokens, begin / kWindow)));
  }
  const int64_t most = MostBytes(name, *model, std::ssize(tokens));
  if (most > options_.bytes) {
    return absl::ResourceExhaustedError(
        absl::StrCat("they may take ", most, " bytes, more than session_bytes, ", options_.bytes));
  }
  const Session before = Take(name, model, tokens, most);
  const auto made = absl::MakeCleanup([this] {
    absl::MutexLock lock(&mu_);
    making_ = 0;
  });
  if (before.tokens.size() == tokens.size())
    return absl::OkStatus();  // a request before brought it
  Session next{.model = model, .tokens = {tokens.begin(), tokens.end()}};
  for (Episode& episode : EpisodesOf(windows, name.episodes)) {
    absl::StatusOr<std::shared_ptr<const Packet>> packet =
        Build(name, model, before.Nearest(episode.centroid), tokens.subspan(before.tokens.size()),
              QueryOf(tokens, episode));
    if (!packet.ok()) return packet.status();  // the next request tries again
    next.episodes.push_back({std::move(episode.centroid), *std::move(packet)});
  }
  absl::MutexLock lock(&mu_);
  if (stopping_) return absl::CancelledError("the server stops");
  next.used = SteadyNow();
  sessions_.insert_or_assign(name, std::move(next));
  ++done_;
  return absl::OkStatus();
}

Sessions::Session Sessions::Take(const Name& name, const ModelPtr& model,
                                 absl::Span<const int32_t> tokens, int64_t bytes) {
  absl::MutexLock lock(&mu_);
  making_ = bytes;
  auto own = sessions_.find(name);
  if (own != sessions_.end() &&
      (!IsModel(own->second.model, model) || !Begins(tokens, own->second.tokens) ||
       own->second.bytes() + making_ > options_.bytes)) {
    sessions_.erase(own);
    own = sessions_.end();
  }
  // Those that were used least recently go first.
  while (this->bytes() > options_.bytes) {
    auto oldest = sessions_.end();
    for (auto other = sessions_.begin(); other != sessions_.end(); ++other) {
      if (other == own) continue;
      if (oldest == sessions_.end() || other->second.used < oldest->second.used) oldest = other;
    }
    sessions_.erase(oldest);
  }
  return own == sessions_.end() ? Session() : own->second;
}

absl::StatusOr<std::shared_ptr<const Packet>> Sessions::Build(
    const Name& name, const ModelPtr& model, const std::shared_ptr<const Packet>& from,
    absl::Span<const int32_t> tokens, std::vector<int64_t> query) {
  const int64_t known = from == nullptr ? 0 : from->num_tokens();
  const int64_t longest = known + std::ssize(tokens) + std::ssize(query);
  RequestOptions options{.id = NewId(), .prompt = {tokens.begin(), tokens.end()}};
  if (from != nullptr) options.packets = {from};
  options.stop.max_output_tokens = 1;
  options.output = {.text = false, .packet = true};
  options.kv = {.policy = "epicache",
                .budget = name.budget,
                .params = {{"query", std::move(query)}},
                .positions = SessionPositions(*model, longest),
                .bypass_prefix_cache = true};
  options.kv.protection.recent = 1;
  options.scheduling = {.priority = Priority::kLow, .tenant = name.tenant};
  options.arrival = SteadyNow();
  const std::string id = options.id;
  std::variant<Request, Rejection> resolved = model->admission->Resolve(std::move(options));
  if (const auto* rejection = std::get_if<Rejection>(&resolved)) {
    return absl::FailedPreconditionError(rejection->message);
  }
  const auto sink = std::make_shared<PacketSink>();
  {
    absl::MutexLock lock(&mu_);
    if (stopping_) return absl::CancelledError("the server stops");
    if (models_.Replaced(*model)) return absl::CancelledError("the model is out of service");
    const SubmitResult submitted =
        model->engine->Submit(std::get<Request>(std::move(resolved)), sink);
    if (submitted.error != SubmitError::kNone) {
      return absl::UnavailableError("the model's queue is full");
    }
    building_ = model;
    building_id_ = id;
  }
  Finished finished = sink->Await();
  {
    absl::MutexLock lock(&mu_);
    building_.reset();
  }
  if (!finished.status.ok()) return finished.status;
  if (finished.packet == nullptr) return absl::ResourceExhaustedError("no memory for the packet");
  return std::move(finished.packet);
}

Metrics::SessionGauges Sessions::usage() const {
  absl::MutexLock lock(&mu_);
  return {.sessions = std::ssize(sessions_),
          .bytes = bytes() - making_,
          .updated = done_,
          .failed = failed_};
}

}  // namespace epikv
