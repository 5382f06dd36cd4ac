#include "server/models/models.h"

#include <iterator>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "server/base/errors.h"

namespace epikv {
namespace {

// Loading takes seconds.
constexpr absl::Duration kRetryDelay = absl::Seconds(2);

// Names of a map's models, for people.
template <typename Map>
std::string NamesOf(const Map& models) {
  return absl::StrJoin(models, ", ", [](std::string* out, const auto& entry) {
    absl::StrAppend(out, "'", entry.first, "'");
  });
}

}  // namespace

Models::~Models() {
  std::list<Retiring> left;
  {
    absl::MutexLock lock(&mu_);
    left.swap(retiring_);
  }
  for (Retiring& retiring : left) retiring.thread.join();
}

std::variant<ModelPtr, grpc::Status> Models::Find(absl::string_view asked) const {
  absl::MutexLock lock(&mu_);
  if (lifecycle_.state() == ServerState::kStarting) {
    return Unavailable(kStarting, "the server is loading its models; try again", kRetryDelay);
  }
  if (asked.empty() && in_service_.size() == 1) return in_service_.begin()->second;
  const auto found = in_service_.find(asked);
  if (found != in_service_.end()) return found->second;
  if (!asked.empty() && asked == loading_) {
    return ToGrpc(Rejection{.code = absl::StatusCode::kFailedPrecondition,
                            .reason = std::string(kLoading),
                            .message = absl::StrCat("model '", asked, "' is being loaded"),
                            .violations = {{"model", "is being loaded"}}});
  }
  if (in_service_.empty()) return NotFound("model", asked, "no model is in service");
  if (asked.empty()) {
    return ToGrpc(Rejection{
        .reason = "INVALID_REQUEST",
        .message =
            absl::StrCat("model: several models are served; name one of ", NamesOf(in_service_)),
        .violations = {{"model", absl::StrCat("must be one of ", NamesOf(in_service_))}}});
  }
  return NotFound(
      "model", asked,
      absl::StrCat("model '", asked, "' is not served here; known: ", NamesOf(in_service_)));
}

ModelPtr Models::Named(absl::string_view name) const {
  absl::MutexLock lock(&mu_);
  const auto found = in_service_.find(name);
  return found == in_service_.end() ? nullptr : found->second;
}

void Models::SetLoading(const std::string& name) {
  absl::MutexLock lock(&mu_);
  loading_ = name;
}

bool Models::Replaced(const ServedModel& model) const {
  absl::MutexLock lock(&mu_);
  const auto found = in_service_.find(model.name);
  return found == in_service_.end() || found->second.get() != &model;
}

bool Models::Serves(const std::weak_ptr<const ServedModel>& model) const {
  absl::MutexLock lock(&mu_);
  return std::any_of(in_service_.begin(), in_service_.end(),
                     [&](const auto& entry) { return IsModel(model, entry.second); });
}

std::vector<ModelPtr> Models::InService() const {
  absl::MutexLock lock(&mu_);
  std::vector<ModelPtr> models;
  for (const auto& [name, model] : in_service_) models.push_back(model);
  return models;
}

std::vector<ModelPtr> Models::Live() const {
  absl::MutexLock lock(&mu_);
  std::vector<ModelPtr> models;
  for (const auto& [name, model] : in_service_) models.push_back(model);
  for (const Retiring& retiring : retiring_) {
    if (!retiring.gone) models.push_back(retiring.model);
  }
  return models;
}

bool Models::Put(ModelPtr model, bool replace) {
  const std::string name = model->name;
  std::list<Retiring> gone;
  {
    absl::MutexLock lock(&mu_);
    if (!replace && in_service_.contains(name)) return false;
    gone = TakeGone();
    if (draining_) model->engine->StartDraining();
    ModelPtr before = std::exchange(in_service_[name], std::move(model));
    if (before != nullptr) Retire(std::move(before), absl::InfiniteFuture());
    lifecycle_.SetModel(name, true);
  }
  for (Retiring& retiring : gone) retiring.thread.join();
  return true;
}

bool Models::Remove(const std::string& name, absl::Time deadline) {
  absl::MutexLock lock(&mu_);
  const auto found = in_service_.find(name);
  if (found == in_service_.end()) return false;
  Retire(std::move(found->second), deadline);
  in_service_.erase(found);
  lifecycle_.SetModel(name, false);
  return true;
}

void Models::Retire(ModelPtr model, absl::Time deadline) {
  model->engine->StartDraining();
  Retiring& retiring = retiring_.emplace_back();
  retiring.model = std::move(model);
  retiring.thread = std::thread([this, &retiring, deadline] {
    retiring.model->engine->Drain(deadline);
    ModelPtr last;  // dropped without the lock: it frees a pool
    absl::MutexLock lock(&mu_);
    last.swap(retiring.model);
    retiring.gone = true;
  });
}

std::list<Models::Retiring> Models::TakeGone() {
  std::list<Retiring> gone;
  for (auto it = retiring_.begin(); it != retiring_.end();) {
    const auto next = std::next(it);
    if (it->gone) gone.splice(gone.end(), retiring_, it);
    it = next;
  }
  return gone;
}

void Models::StartDraining() {
  absl::MutexLock lock(&mu_);
  draining_ = true;
  lifecycle_.SetState(ServerState::kDraining);  // first, so that balancers turn away
  for (const auto& [name, model] : in_service_) model->engine->StartDraining();
}

bool Models::Resume() {
  absl::MutexLock lock(&mu_);
  if (stopping_) return false;
  draining_ = false;
  for (const auto& [name, model] : in_service_) model->engine->Resume();
  lifecycle_.SetState(ServerState::kServing);
  return true;
}

bool Models::stopping() const {
  absl::MutexLock lock(&mu_);
  return stopping_;
}

void Models::Drain(absl::Time deadline) {
  {
    absl::MutexLock lock(&mu_);
    stopping_ = true;
  }
  StartDraining();
  for (const ModelPtr& model : Live()) model->engine->Drain(deadline);
}

}  // namespace epikv
