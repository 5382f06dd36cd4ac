#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "runtime/kv_format.h"
#include "runtime/model.h"
#include "runtime/request.h"

namespace epikv {

// A model as laws look at it: records the logits of every wanted row, and may change what the
// attention operator is given.
class LawModel final : public Model {
 public:
  using Meddle = std::function<void(const at::Tensor& token_ids, at::Tensor& q, at::Tensor& k,
                                    at::Tensor& v, int64_t layer)>;

  explicit LawModel(std::shared_ptr<const Model> model)
      : Model({.manifest = model->manifest(),
               .tokenizer_json = model->tokenizer_json(),
               .device = model->device()}),
        model_(std::move(model)) {}

  at::Tensor Forward(const at::Tensor& token_ids, const at::Tensor& positions,
                     const at::Tensor& last, ForwardHooks& hooks) const override;
  at::Tensor output_projection(int64_t layer) const override {
    return model_->output_projection(layer);
  }

  void SetMeddle(Meddle meddle) { meddle_ = std::move(meddle); }
  // Rows of logits since the last call, each [vocab], in the order of the forwards. Padding rows
  // of deterministic mode are among them.
  std::vector<at::Tensor> TakeLogits() const {
    std::vector<at::Tensor> logits = std::exchange(logits_, {});
    for (at::Tensor& row : logits) row = row.cpu();
    return logits;
  }

 private:
  const std::shared_ptr<const Model> model_;
  Meddle meddle_;
  mutable std::vector<at::Tensor> logits_;
};

// What a sequence's logits are by definition: token by token over tensors that hold every token
// ever cached, with plain attention under a mask of what is still kept. Shares no code with the
// executor. fp32; of int8, K and V are rounded to what their rows can hold.
class MaskedReference {
 public:
  explicit MaskedReference(const Model& model, KvDType stored = KvDType::kModel)
      : model_(model), stored_(stored) {}

  struct Dropped {
    int64_t at_token = 0;  // after the step that cached this token
    int64_t layer = 0, head = 0;
    int64_t index = 0;
  };

  // What one token's step gives.
  struct Step {
    at::Tensor logits;                  // [vocab]
    std::vector<at::Tensor> residuals;  // [layers] of [hidden]: after each block
    std::vector<at::Tensor> attention;  // [layers] of [kv_heads, tokens so far]: group means
  };

  // Steps of all tokens, at these positions.
  std::vector<Step> Run(const std::vector<int32_t>& tokens, const std::vector<Dropped>& dropped,
                        PositionMode positions = PositionMode::kAbsolute) const;

 private:
  const Model& model_;
  const KvDType stored_;
};

}  // namespace epikv
