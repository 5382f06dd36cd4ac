#include "runtime/signals/signals.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "runtime/kernels/kernels.h"

namespace epikv {

ResidualTap::ResidualTap(std::vector<int64_t> layers, int64_t hidden_size)
    : layers_(std::move(layers)),
      hidden_size_(hidden_size),
      before_(layers_.size() * hidden_size),
      steps_(layers_.size()),
      taken_(1, Taken{.residuals = before_, .steps = steps_}) {}

void ResidualTap::Take(int64_t place, const void* residual, DType dtype, int64_t ahead) {
  const int64_t at = place * hidden_size_;
  Taken& taken = TakenOf(ahead);
  const std::vector<float>& before = ahead == 0 ? before_ : taken_[ahead - 1].residuals;
  taken.steps[place] =
      StepNorm(residual, before.data() + at, taken.residuals.data() + at, hidden_size_, dtype);
}

ResidualTap::Taken& ResidualTap::TakenOf(int64_t ahead) {
  while (std::ssize(taken_) <= ahead) {
    taken_.push_back({.residuals = std::vector<float>(before_.size()),
                      .steps = std::vector<float>(steps_.size())});
  }
  return taken_[ahead];
}

void ResidualTap::PutSteps(absl::Span<const float> steps) {
  std::copy(steps.begin(), steps.end(), taken_.front().steps.begin());
}

void ResidualTap::PutResiduals(absl::Span<const float> residuals) {
  std::copy(residuals.begin(), residuals.end(), taken_.front().residuals.begin());
}

void ResidualTap::Commit(bool decode, int64_t ahead) {
  Taken& taken = TakenOf(ahead);
  before_.swap(taken.residuals);
  steps_.swap(taken.steps);
  decode_ = decode && any_;
  any_ = true;
}

void ResidualTap::Restore(absl::Span<const float> residuals) {
  for (size_t place = 0; place < layers_.size(); ++place) {
    const absl::Span<const float> of =
        residuals.subspan(layers_[place] * hidden_size_, hidden_size_);
    std::copy(of.begin(), of.end(), before_.begin() + static_cast<int64_t>(place) * hidden_size_);
  }
  decode_ = false;
  any_ = true;
}

absl::Span<const float> ResidualTap::steps() const {
  return decode_ ? absl::MakeConstSpan(steps_) : absl::Span<const float>();
}

std::vector<float> ResidualTap::StepsOf(absl::Span<const int64_t> layers) const {
  std::vector<float> of;
  if (!decode_) return of;
  of.reserve(layers.size());
  for (int64_t layer : layers) of.push_back(steps_[PlaceOf(layer)]);
  return of;
}

std::vector<absl::Span<const float>> ResidualTap::ResidualsOf(
    absl::Span<const int64_t> layers) const {
  std::vector<absl::Span<const float>> of;
  if (!decode_) return of;
  of.reserve(layers.size());
  for (int64_t layer : layers) {
    of.emplace_back(before_.data() + PlaceOf(layer) * hidden_size_, hidden_size_);
  }
  return of;
}

int64_t ResidualTap::PlaceOf(int64_t layer) const {
  return std::lower_bound(layers_.begin(), layers_.end(), layer) - layers_.begin();
}

QueryWindow::QueryWindow(int64_t num_layers, int64_t capacity, int64_t row_bytes)
    : num_layers_(num_layers),
      capacity_(capacity),
      row_bytes_(row_bytes),
      rows_(num_layers * capacity * row_bytes),
      taken_(rows_.size()) {}

void QueryWindow::Take(int64_t layer, const char* rows, int64_t count, int64_t ahead) {
  if (ahead > 0) {
    if (std::ssize(taken_ahead_) < ahead) taken_ahead_.resize(ahead);
    std::vector<char>& taken = taken_ahead_[ahead - 1];
    taken.resize(num_layers_ * row_bytes_);
    std::memcpy(taken.data() + layer * row_bytes_, rows, row_bytes_);
    return;
  }
  const int64_t kept = std::min(count, capacity_);
  std::memcpy(taken_.data() + layer * capacity_ * row_bytes_, rows + (count - kept) * row_bytes_,
              kept * row_bytes_);
}

void QueryWindow::Commit(int64_t count, int64_t ahead) {
  const int64_t kept = std::min(count, capacity_);
  for (int64_t layer = 0; ahead > 0 && kept > 0 && layer < num_layers_; ++layer) {
    std::memcpy(taken_.data() + layer * capacity_ * row_bytes_,
                taken_ahead_[ahead - 1].data() + layer * row_bytes_, row_bytes_);
  }
  for (int64_t layer = 0; layer < num_layers_; ++layer) {
    const int64_t begin = layer * capacity_;
    for (int64_t i = 0; i < kept; ++i) {
      std::memcpy(rows_.data() + (begin + (next_ + i) % capacity_) * row_bytes_,
                  taken_.data() + (begin + i) * row_bytes_, row_bytes_);
    }
  }
  if (capacity_ > 0) next_ = (next_ + kept) % capacity_;
  size_ = std::min(capacity_, size_ + kept);
}

void QueryWindow::Read(int64_t layer, char* out) const {
  const int64_t begin = layer * capacity_;
  for (int64_t i = 0; i < size_; ++i) {
    const int64_t row = begin + (next_ + capacity_ - size_ + i) % capacity_;
    std::memcpy(out + i * row_bytes_, rows_.data() + row * row_bytes_, row_bytes_);
  }
}

bool LaneRowsOfStep::Has(int64_t layer) const {
  return layers_.empty() || std::binary_search(layers_.begin(), layers_.end(), layer);
}

void LaneRowsOfStep::Resize(absl::Span<const int64_t> used) {
  starts_.assign(1, 0);
  for (size_t lane = 0; lane < used.size(); ++lane) {
    const int64_t slots = Has(static_cast<int64_t>(lane) / num_kv_heads_) ? used[lane] : 0;
    starts_.push_back(starts_.back() + slots);
  }
  rows_.resize(starts_.back());
}

void LaneRowsOfStep::SwapRows(LaneRowsOfStep& other) {
  starts_.swap(other.starts_);
  rows_.swap(other.rows_);
}

absl::Span<float> LaneRowsOfStep::layer(int64_t layer) {
  const int64_t begin = starts_[layer * num_kv_heads_], end = starts_[(layer + 1) * num_kv_heads_];
  return absl::MakeSpan(rows_).subspan(begin, end - begin);
}

absl::Span<float> LaneRowsOfStep::lane(int64_t layer, int64_t head) {
  const int64_t lane = layer * num_kv_heads_ + head;
  return absl::MakeSpan(rows_).subspan(starts_[lane], starts_[lane + 1] - starts_[lane]);
}

absl::Span<const float> LaneRowsOfStep::at(int64_t layer, int64_t head) const {
  if (!Has(layer)) {
    throw std::out_of_range(absl::StrCat("attention of layer ", layer, " was not declared"));
  }
  const int64_t lane = layer * num_kv_heads_ + head;
  return absl::MakeConstSpan(rows_).subspan(starts_[lane], starts_[lane + 1] - starts_[lane]);
}

}  // namespace epikv
