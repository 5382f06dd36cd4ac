#include "runtime/forward/recorded_steps.h"

#include <algorithm>
#include <bit>

namespace epikv {
namespace {

constexpr size_t kMostSteps = 64;
constexpr int64_t kMostRows = 512, kFewRows = 8, kShortest = 256;

}  // namespace

std::vector<at::Tensor> SeenStep::Tensors() const {
  std::vector<at::Tensor> all = {logits, index};
  for (const SeenLayer& layer : layers) {
    all.insert(all.end(), {layer.normed, layer.q, layer.rotated, layer.residual});
  }
  return all;
}

SeenStep SeenStep::Of(const std::vector<at::Tensor>& tensors) {
  SeenStep step = {.logits = tensors[0], .index = tensors[1]};
  for (size_t i = 2; i < tensors.size(); i += 4) {
    step.layers.push_back({.normed = tensors[i],
                           .q = tensors[i + 1],
                           .rotated = tensors[i + 2],
                           .residual = tensors[i + 3]});
  }
  return step;
}

// Powers of two and, from 12 on, what lies half-way between them.
int64_t RecordedSteps::Rows(int64_t count) {
  if (count > kMostRows) return 0;
  const auto power = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(count)));
  return power > kFewRows && count <= power / 4 * 3 ? power / 4 * 3 : power;
}

int64_t RecordedSteps::Length(int64_t longest) {
  return std::max(kShortest, static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(longest))));
}

RecordedStep& RecordedSteps::Find(const PaddedLayout& layout) {
  if (!steps_.contains(layout) && steps_.size() >= kMostSteps) {
    steps_.erase(std::min_element(steps_.begin(), steps_.end(), [](const auto& a, const auto& b) {
      return a.second.at < b.second.at;
    }));
  }
  Used& used = steps_[layout];
  if (used.step == nullptr) used.step = std::make_unique<RecordedStep>();
  used.at = ++time_;
  return *used.step;
}

}  // namespace epikv
