#include "runtime/engine/engine.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "tests/fixtures/engine_fixture.h"

namespace epikv {
namespace engine_cancels_test {

using testing::ElementsAre;

// Cancelling.

TEST_F(EngineTest, CancelFreesKvInEveryState) {
  Build({.engine = {.scheduler = {.prefill_chunk_tokens = 8}, .max_running_requests = 1}});
  const absl::Status gone = absl::CancelledError("the client has gone");
  struct State {
    const char* name;
    int steps;
  };
  for (const State& state :
       {State{"queued", 0}, State{"prefilling", 1}, State{"prefilled", 3}, State{"decoding", 5}}) {
    SCOPED_TRACE(state.name);
    const std::string id = absl::StrCat("a-", state.name);
    auto output = Submit(Ask(id, 20, 10));
    for (int i = 0; i < state.steps; ++i) engine_->Step();
    EXPECT_EQ(script_->open_sequences, state.steps > 0);
    log_.Take();
    EXPECT_TRUE(engine_->Cancel(id, gone));
    EXPECT_EQ(log_.Take(), id + "> cancelled: CANCELLED: the client has gone\n");
    ExpectNothingHeld();
    EXPECT_EQ(engine_->running() + engine_->waiting(), 0);
    EXPECT_FALSE(engine_->Cancel(id, gone));
    EXPECT_FALSE(engine_->Step());
  }
}

TEST_F(EngineTest, CancelEndsAPausedRequest) {
  auto output = Submit(Ask("a", 20, 10));
  engine_->Step();
  output->ready = false;
  EXPECT_FALSE(engine_->Step());
  EXPECT_TRUE(engine_->Cancel("a", absl::CancelledError("slow")));
  ExpectNothingHeld();
}

// Else one that pauses would keep the others out: the pool starts anew once nothing holds it.
TEST_F(EngineTest, LostPoolEndsAPausedRequestAndServesTheNext) {
  Submit(Ask("a", 20, 10));
  Submit(Ask("b", 20, 10));
  engine_->Step();
  outputs_["a"]->ready = false;
  script_->lost = true;
  Submit(Ask("c", 20, 10));
  EXPECT_TRUE(engine_->Step());
  for (const char* id : {"a", "b"}) {
    EXPECT_EQ(outputs_[id]->finished.front().status.code(), absl::StatusCode::kInternal);
  }
  RunAll();
  EXPECT_EQ(outputs_["c"]->reason(), "length");
  ExpectNothingHeld();
}

TEST_F(EngineTest, CancelOfAQueuedRequestKeepsTheOrder) {
  Build({.engine = {.max_running_requests = 1}});
  for (const char* id : {"a", "b", "c", "d"}) Submit(Ask(id, 5, 2));
  engine_->Step();
  EXPECT_TRUE(engine_->Cancel("c", absl::CancelledError("")));
  RunAll();
  EXPECT_THAT(observer_.admitted, ElementsAre("a", "b", "d"));
}

TEST_F(EngineTest, CancelOfNobodyIsFalse) {
  Submit(Ask("a", 5, 1));
  EXPECT_FALSE(engine_->Cancel("b", absl::CancelledError("")));
  RunAll();
  EXPECT_FALSE(engine_->Cancel("a", absl::CancelledError("")));
}

TEST_F(EngineTest, CancelAllEndsQueuedAndRunning) {
  Build({.engine = {.max_running_requests = 1}});
  const auto a = Submit(Ask("a", 5, 10));
  const auto b = Submit(Ask("b", 5, 10));
  engine_->Step();
  engine_->CancelAll(absl::UnavailableError("shutting down"));
  for (const auto& output : {a, b}) {
    ASSERT_EQ(output->reason(), "cancelled");
    EXPECT_EQ(output->finished.at(0).status, absl::UnavailableError("shutting down"));
  }
  ExpectNothingHeld();
}

TEST_F(EngineTest, DestructorEndsWhatIsLive) {
  Build({.engine = {.max_running_requests = 1}});
  const auto a = Submit(Ask("a", 5, 10));
  const auto b = Submit(Ask("b", 5, 10));
  engine_->Step();
  engine_.reset();
  EXPECT_EQ(a->reason(), "cancelled");
  EXPECT_EQ(b->reason(), "cancelled");
}

TEST_F(EngineTest, IdIsFreeAfterTheEnd) {
  Submit(Ask("a", 5, 10));
  engine_->Step();
  engine_->Cancel("a", absl::CancelledError(""));
  observer_.finished_count.clear();
  const auto again = Submit(Ask("a", 5, 2));
  RunAll();
  EXPECT_EQ(again->reason(), "length");
}

// Pausing.

TEST_F(EngineTest, PausedRequestsAreLeftOutAndGoOn) {
  const auto a = Submit(Ask("a", 5, 4));
  Submit(Ask("b", 10, 4));
  engine_->Step();
  a->ready = false;
  EXPECT_EQ(Step(),
            "b> tokens 11 ' w11'\n"
            "step of 1: prefill 0, decode 1\n");
  RunAll();
  EXPECT_EQ(outputs_["b"]->reason(), "length");
  EXPECT_FALSE(a->ended());
  EXPECT_FALSE(engine_->Step());
  a->ready = true;
  RunAll();
  EXPECT_THAT(a->tokens, ElementsAre(5, 6, 7, 8));
}

}  // namespace engine_cancels_test
}  // namespace epikv
