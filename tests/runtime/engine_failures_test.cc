#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <vector>

#include "runtime/base/reason.h"
#include "tests/fixtures/engine_fixture.h"

namespace epikv {
namespace engine_failures_test {

using testing::ElementsAre;
using testing::HasSubstr;

// Failures.

TEST_F(EngineTest, FailedForwardIsRepeatedAloneAndOnlyTheGuiltyFails) {
  const auto a = Submit(Ask("a", 5, 6));
  const auto b = Submit(Ask("b", 10, 6));
  const auto c = Submit(Ask("c", 20, 6));
  std::vector<size_t> sizes;
  int b_runs = 0;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    sizes.push_back(items.size());
    if (!HasRequest(items, "b")) return absl::OkStatus();
    return ++b_runs >= 3 ? Boom() : absl::OkStatus();
  };
  engine_->Step();
  engine_->Step();
  sizes.clear();
  EXPECT_EQ(Step(),
            "a> tokens 7 ' w7'\n"
            "b> error: INTERNAL: the forward failed: boom\n"
            "c> tokens 22 ' w22'\n"
            "step of 3: prefill 0, decode 2\n");
  EXPECT_THAT(sizes, ElementsAre(3, 1, 1, 1));
  EXPECT_EQ(script_->open_sequences, 2) << "b's KV is free within the step";
  RunAll();
  EXPECT_THAT(a->tokens, ElementsAre(5, 6, 7, 8, 9, 10));
  EXPECT_THAT(b->tokens, ElementsAre(10, 11));
  EXPECT_THAT(c->tokens, ElementsAre(20, 21, 22, 23, 24, 25));
  EXPECT_EQ(b->finished.at(0).output_tokens, 2);
  ExpectNothingHeld();
}

TEST_F(EngineTest, ForwardThatFailsOnceHarmsNobody) {
  RecordItems();
  const auto a = Submit(Ask("a", 5, 6));
  const auto b = Submit(Ask("b", 10, 6));
  int forwards = 0;
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    return ++forwards == 3 ? Boom() : absl::OkStatus();
  };
  RunAll();
  EXPECT_THAT(a->tokens, ElementsAre(5, 6, 7, 8, 9, 10));
  EXPECT_THAT(b->tokens, ElementsAre(10, 11, 12, 13, 14, 15));
  // Nothing of the failed step counted: each index was cached once.
  std::map<std::string, int64_t> next;
  for (const SeenItem& item : seen_) {
    EXPECT_EQ(item.first, next[item.id]) << item.id;
    next[item.id] += item.tokens.size();
  }
}

TEST_F(EngineTest, OneAloneIsNotRepeated) {
  Submit(Ask("a", 5, 6));
  int forwards = 0;
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    ++forwards;
    return Boom();
  };
  EXPECT_THAT(Step(), HasSubstr("a> error: INTERNAL: the forward failed: boom"));
  EXPECT_EQ(forwards, 1);
  ExpectNothingHeld();
}

TEST_F(EngineTest, FailedItemEndsAlone) {
  const auto a = Submit(Ask("a", 5, 3));
  Submit(Ask("b", 10, 3));
  script_->on_item = [](const WorkItem& item) {
    return item.request->id == "b" && item.decode ? Boom() : absl::OkStatus();
  };
  engine_->Step();
  EXPECT_EQ(Step(),
            "a> tokens 6 ' w6'\n"
            "b> error: INTERNAL: boom\n"
            "step of 2: prefill 0, decode 1\n");
  EXPECT_EQ(script_->open_sequences, 1);
  RunAll();
  EXPECT_EQ(a->reason(), "length");
}

// Nothing has been done where all of them throw together: each is settled alone.
TEST_F(EngineTest, WhatThrowsWhileItSettlesEndsAlone) {
  const auto a = Submit(Ask("a", 5, 10, "by_chunk", 8));
  const auto b = Submit(Ask("b", 5, 10, "by_chunk", 8));
  script_->on_settle = [](const WorkItem& item) {
    if (item.request->id == "b" && item.decode) throw std::bad_alloc();
    return absl::OkStatus();
  };
  RunAll();
  EXPECT_EQ(a->reason(), "length");
  EXPECT_EQ(b->finished.front().status.code(), absl::StatusCode::kInternal);
  ExpectNothingHeld();
}

TEST_F(EngineTest, FailedPolicyEndsItsRequestAlone) {
  const auto a = Submit(Ask("a", 5, 10, "by_chunk", 8));
  Submit(Ask("b", 5, 10, "by_chunk", 8));
  script_->on_settle = [](const WorkItem& item) {
    return item.request->id == "b" && item.decode ? WithReason(Boom(), kPolicyFailed)
                                                  : absl::OkStatus();
  };
  engine_->Step();
  EXPECT_EQ(Step(),
            "a> tokens 6 ' w6'\n"
            "b> tokens 6 ' w6'\n"
            "b> error: INTERNAL: boom [epikv/reason='POLICY_FAILED']\n"
            "step of 2: prefill 0, decode 2\n");
  EXPECT_EQ(script_->open_sequences, 1);
  RunAll();
  EXPECT_EQ(a->reason(), "length");
  ExpectNothingHeld();
}

TEST_F(EngineTest, FailedOpenLetsTheNextInAtOnce) {
  Build({.kv_tokens = 20});
  script_->on_open = [](const Request& request) {
    return request.id == "a" ? Boom() : absl::OkStatus();
  };
  Submit(Ask("a", 10, 11));
  Submit(Ask("b", 10, 11));
  EXPECT_EQ(Step(),
            "a> error: INTERNAL: boom\n"
            "admitted b\n"
            "first token b\n"
            "b> tokens 10 'w10'\n"
            "step of 1: prefill 10, decode 0\n");
}

// Otherwise Step would say that nothing can run, and nobody would call it again.
TEST_F(EngineTest, FailedOpenDoesNotCountAsRunning) {
  Build({.engine = {.max_running_requests = 1}});
  script_->on_open = [](const Request& request) {
    return request.id == "b" ? absl::OkStatus() : Boom();
  };
  Submit(Ask("a", 10, 1));
  Submit(Ask("b", 10, 1));
  EXPECT_TRUE(engine_->Step());
  EXPECT_EQ(outputs_["b"]->reason(), "length");
}

}  // namespace engine_failures_test
}  // namespace epikv
