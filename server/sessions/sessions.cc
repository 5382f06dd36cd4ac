#include "server/sessions/sessions.h"

#include <algorithm>
#include <utility>
#include <variant>

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

Sessions::Sessions(const SessionsOptions& options, const Models& models)
    : options_(options), models_(models), set_aside_(options.bytes) {}

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

int64_t Sessions::bytes() const {
  int64_t bytes = 0;
  for (const auto& [name, session] : sessions_) bytes += session.bytes();
  return bytes;
}

// Forgets those that nobody used for long, or whose model has gone.
void Sessions::Sweep() {
  const absl::Time now = SteadyNow();
  std::erase_if(sessions_, [&](const auto& entry) {
    const std::shared_ptr<const ServedModel> model = entry.second.model.lock();
    return now - entry.second.used > options_.ttl || model == nullptr || models_.Replaced(*model);
  });
}

// Those that were used least recently go first.
void Sessions::MakeRoom() {
  while (!sessions_.empty() && bytes() > options_.bytes) {
    sessions_.erase(std::min_element(
        sessions_.begin(), sessions_.end(),
        [](const auto& a, const auto& b) { return a.second.used < b.second.used; }));
  }
}

bool Sessions::HasRoomFor(const Name& name, const ServedModel& model) const {
  const int64_t token_bytes = model.admission->kv_bytes_per_token();
  return name.budget <= options_.bytes / token_bytes / std::max<int64_t>(1, name.episodes);
}

Sessions::Start Sessions::Find(const Name& name, const ServedModel& model,
                               absl::Span<const int32_t> prompt, const Embedding& question) {
  absl::MutexLock lock(&mu_);
  Sweep();
  const auto found = sessions_.find(name);
  if (found == sessions_.end()) return {};
  Session& session = found->second;
  if (session.model.lock().get() != &model || session.episodes.empty() ||
      session.tokens.size() >= prompt.size() || !Begins(prompt, session.tokens)) {
    return {};
  }
  session.used = SteadyNow();
  std::vector<Embedding> centroids;
  for (const Kept& kept : session.episodes) centroids.push_back(kept.centroid);
  const Kept& nearest = session.episodes[NearestEpisode(centroids, question)];
  return {.episode = nearest.packet, .tokens = std::ssize(session.tokens)};
}

void Sessions::Extend(const Name& name, const ModelPtr& model, std::vector<int32_t> tokens) {
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
  updating_.Post(owner, size,
                 [this, name, model, tokens = std::move(tokens)] { Update(name, model, tokens); });
}

void Sessions::Update(const Name& name, const ModelPtr& model, const std::vector<int32_t>& tokens) {
  const int64_t chunk = model->admission->limits().prefill_chunk_tokens;
  // In whole blocks, so that each is scored behind its end; the newest tokens stay outside.
  const int64_t size = (std::ssize(tokens) - 1) / chunk * chunk;
  std::vector<Kept> before;
  std::vector<int32_t> covered;
  {
    absl::MutexLock lock(&mu_);
    const auto found = sessions_.find(name);
    if (found != sessions_.end() && found->second.model.lock() == model &&
        Begins(tokens, found->second.tokens)) {
      before = found->second.episodes;
      covered = found->second.tokens;
    }
  }
  if (size <= std::ssize(covered) || size <= name.budget || !HasRoomFor(name, *model)) return;
  const auto all = absl::MakeConstSpan(tokens);
  std::vector<Embedding> windows;
  for (int64_t begin = 0; begin < size; begin += kWindow) {
    windows.push_back(model->embed(all.subspan(begin, std::min(kWindow, size - begin))));
  }
  Session next{.model = model, .tokens = {tokens.begin(), tokens.begin() + size}};
  for (Episode& episode : EpisodesOf(windows, name.episodes)) {
    std::vector<int64_t> asking = episode.windows;
    asking.resize(std::min(std::ssize(asking), kMedoids));
    std::sort(asking.begin(), asking.end());
    std::vector<int64_t> query;
    for (const int64_t window : asking) {
      const auto part = all.subspan(window * kWindow, std::min(kWindow, size - window * kWindow));
      query.insert(query.end(), part.begin(), part.end());
    }
    std::vector<Embedding> centroids;
    for (const Kept& kept : before) centroids.push_back(kept.centroid);
    const std::shared_ptr<const Packet> from =
        before.empty() ? nullptr : before[NearestEpisode(centroids, episode.centroid)].packet;
    const int64_t first = from == nullptr ? 0 : std::ssize(covered);
    absl::StatusOr<std::shared_ptr<const Packet>> packet =
        Build(name, model, from, {tokens.begin() + first, tokens.begin() + size}, std::move(query));
    if (!packet.ok()) return;  // the next request tries again
    next.episodes.push_back({std::move(episode.centroid), *std::move(packet)});
  }
  absl::MutexLock lock(&mu_);
  next.used = SteadyNow();
  if (stopping_ || next.bytes() > options_.bytes) return;
  sessions_.insert_or_assign(name, std::move(next));
  ++updates_;
  MakeRoom();
}

absl::StatusOr<std::shared_ptr<const Packet>> Sessions::Build(
    const Name& name, const ModelPtr& model, const std::shared_ptr<const Packet>& from,
    std::vector<int32_t> tokens, std::vector<int64_t> query) {
  const int64_t known = from == nullptr ? 0 : from->num_tokens();
  const int64_t longest = known + std::ssize(tokens) + std::ssize(query);
  RequestOptions options{.id = NewId(), .prompt = std::move(tokens)};
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
    const SubmitResult submitted =
        model->engine->Submit(std::get<Request>(std::move(resolved)), sink);
    if (submitted.error != SubmitError::kNone) return absl::UnavailableError("it is not taken");
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
  return {.sessions = std::ssize(sessions_), .bytes = bytes(), .updates = updates_};
}

}  // namespace epikv
