#include "server/generation/generation_service.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "server/base/errors.h"
#include "tests/fixtures/error_details.h"
#include "tests/fixtures/generation_fixture.h"

namespace epikv {
namespace generation_load_test {

using ::testing::ElementsAre;
using ::testing::SizeIs;

TEST_F(GenerationServiceTest, QueueFullIsToldWithRetryInfoAndHurtsNobody) {
  Gate gate;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].decode);  // the queue is counted once per step
    return absl::OkStatus();
  };
  Start({.engine = {.max_running_requests = 1}, .queue = {.max_requests = 2}});
  StreamClient running(stub(), Prompt(10, 3));
  ASSERT_TRUE(gate.AwaitHeld());
  StreamClient second(stub(), Prompt(10, 3)), third(stub(), Prompt(10, 3));
  EXPECT_EQ(second.AwaitMessages(1)[0].accepted().queue_position() +
                third.AwaitMessages(1)[0].accepted().queue_position(),
            1u);
  grpc::ClientContext context;
  v1::GenerateResult result;
  const grpc::Status status = stub().GenerateOnce(&context, Prompt(10, 3), &result);
  EXPECT_EQ(status.error_code(), grpc::RESOURCE_EXHAUSTED);
  EXPECT_EQ(ReasonIn(status), "QUEUE_FULL");
  EXPECT_TRUE(Detail<v1::QuotaFailure>(status, "QuotaFailure").has_value());
  EXPECT_EQ(Detail<v1::RetryInfo>(status, "RetryInfo")->retry_delay().seconds(), 1);
  const auto& trailers = context.GetServerTrailingMetadata();
  ASSERT_EQ(trailers.count("grpc-retry-pushback-ms"), 1u);
  EXPECT_EQ(trailers.find("grpc-retry-pushback-ms")->second, "1000");
  gate.Open();
  for (StreamClient* client : {&running, &second, &third}) {
    EXPECT_TRUE(client->AwaitDone().ok());
    EXPECT_THAT(client->token_ids(), ElementsAre(11, 12, 13));
  }
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, PrioritiesAndTenantsDecideWhoIsNext) {
  Gate gate;
  std::vector<std::string> order;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].decode);
    return absl::OkStatus();
  };
  script_->on_open = [&](const Request& request) {
    order.push_back(request.id);
    return absl::OkStatus();
  };
  Start({.engine = {.max_running_requests = 1}});
  auto asked = [](const std::string& id, v1::Priority priority, const std::string& tenant) {
    auto request = Prompt(10, 3);
    request.set_request_id(id);
    request.mutable_scheduling()->set_priority(priority);
    request.mutable_scheduling()->set_tenant(tenant);
    return request;
  };
  StreamClient running(stub(), Prompt(10, 3));
  ASSERT_TRUE(gate.AwaitHeld());
  const auto first = running.AwaitMessages(1)[0].accepted();
  EXPECT_TRUE(first.has_predicted_wait()) << "there was room";
  EXPECT_EQ(first.predicted_wait().seconds() + first.predicted_wait().nanos(), 0);
  order.clear();
  std::vector<std::unique_ptr<StreamClient>> waiting;
  for (const auto& request :
       {asked("low", v1::PRIORITY_LOW, "a"), asked("normal", v1::PRIORITY_UNSPECIFIED, "a"),
        asked("high", v1::PRIORITY_HIGH, "b")}) {
    waiting.push_back(std::make_unique<StreamClient>(stub(), request));
    const auto accepted = waiting.back()->AwaitMessages(1)[0].accepted();
    EXPECT_EQ(accepted.queue_position(), 0u);
    EXPECT_EQ(accepted.scheduling().tenant(), request.scheduling().tenant());
    EXPECT_NE(accepted.scheduling().priority(), v1::PRIORITY_UNSPECIFIED) << "as it is used";
    EXPECT_FALSE(accepted.has_predicted_wait()) << "nothing was measured";
  }
  gate.Open();
  for (const auto& client : waiting) EXPECT_TRUE(client->AwaitDone().ok());
  EXPECT_TRUE(running.AwaitDone().ok());
  EXPECT_TRUE(server_->AwaitEmpty());
  EXPECT_THAT(order, ElementsAre("high", "normal", "low"));
}

TEST_F(GenerationServiceTest, DeadlineThatCannotBeMetIsRefusedWithTheEstimate) {
  script_->next = [](int32_t) { return 5; };
  script_->on_forward = [](absl::Span<const WorkItem>) {
    absl::SleepFor(absl::Milliseconds(2));  // a model that takes time
    return absl::OkStatus();
  };
  v1::GenerateResult result;
  ASSERT_TRUE(Once(Prompt(10, 40), &result).ok());
  ASSERT_TRUE(server_->AwaitEmpty());
  auto within = [&](absl::Duration time) {
    grpc::ClientContext context;
    context.set_deadline(absl::ToChronoTime(absl::Now() + time));
    v1::GenerateRequest request = Prompt(10, 4000);
    request.mutable_stop()->set_ignore_eos(true);
    return stub().GenerateOnce(&context, request, &result);
  };
  grpc::Status status;
  do {                                  // what was measured is told once per step
    status = within(absl::Seconds(5));  // for 8 s of work
  } while (ReasonIn(status) != "DEADLINE_INFEASIBLE");
  EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED);
  const auto info = Detail<v1::ErrorInfo>(status, "ErrorInfo").value();
  EXPECT_EQ(info.metadata().at("wait_seconds"), "0.000");
  EXPECT_GT(std::stod(info.metadata().at("run_seconds")), 7.9);
  EXPECT_LE(std::stod(info.metadata().at("seconds_left")), 5.1);
  EXPECT_FALSE(Detail<v1::RetryInfo>(status, "RetryInfo")) << "it would not help";
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, DropFromTheQueueCarriesADelay) {
  Start({.engine = {.max_running_requests = 1}});
  script_->next = [](int32_t) { return 5; };
  script_->on_forward = [](absl::Span<const WorkItem>) {
    absl::SleepFor(absl::Milliseconds(2));
    return absl::OkStatus();
  };
  v1::GenerateResult result;
  ASSERT_TRUE(Once(Prompt(10, 40), &result).ok());
  ASSERT_TRUE(server_->AwaitEmpty());
  grpc::ClientContext running;
  const auto stream = stub().Generate(&running, Prompt(10, 4000));
  v1::GenerateResponse response;
  while (!response.has_delta()) ASSERT_TRUE(stream->Read(&response));
  v1::GenerateRequest request = Prompt(10, 50);
  request.mutable_stop()->set_ignore_eos(true);
  grpc::ClientContext context;
  context.set_deadline(absl::ToChronoTime(absl::Now() + absl::Milliseconds(600)));
  const grpc::Status status = stub().GenerateOnce(&context, request, &result);
  EXPECT_EQ(status.error_code(), grpc::DEADLINE_EXCEEDED);
  EXPECT_EQ(ReasonIn(status), "DEADLINE_INFEASIBLE");
  const auto retry = Detail<v1::RetryInfo>(status, "RetryInfo");
  ASSERT_TRUE(retry.has_value());
  const auto& trailers = context.GetServerTrailingMetadata();
  ASSERT_EQ(trailers.count("grpc-retry-pushback-ms"), 1u);
  const grpc::string_ref pushback = trailers.find("grpc-retry-pushback-ms")->second;
  EXPECT_EQ(std::stoll(std::string(pushback.data(), pushback.size())),
            retry->retry_delay().seconds() * 1000 + retry->retry_delay().nanos() / 1000000);
  running.TryCancel();
  while (stream->Read(&response)) {
  }
  EXPECT_EQ(stream->Finish().error_code(), grpc::CANCELLED);
}

TEST_F(GenerationServiceTest, DuplicateIdIsRefusedWhileTheFirstLives) {
  Gate gate;
  script_->on_forward = [&](absl::Span<const WorkItem>) {
    gate.Pass(true);
    return absl::OkStatus();
  };
  auto request = Prompt(10, 3);
  request.set_request_id("mine");
  StreamClient first(stub(), request);
  ASSERT_TRUE(gate.AwaitHeld());
  const grpc::Status status = Refused(request);
  EXPECT_EQ(status.error_code(), grpc::ALREADY_EXISTS);
  EXPECT_EQ(Detail<v1::ResourceInfo>(status, "ResourceInfo")->resource_name(), "mine");
  gate.Open();
  EXPECT_TRUE(first.AwaitDone().ok());
  EXPECT_THAT(first.token_ids(), SizeIs(3));
  v1::GenerateResult result;
  EXPECT_TRUE(Once(request, &result).ok()) << "the id is free again";
}

// The step under way is the last one that runs a cancelled request.
TEST_F(GenerationServiceTest, CancelRequestEndsItWithinOneStep) {
  Gate gate;
  std::atomic<int> forwards_after{0};
  std::atomic<bool> cancelled{false};
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    if (cancelled) ++forwards_after;
    gate.Pass(items[0].decode && items[0].first > 10);
    return absl::OkStatus();
  };
  auto request = Prompt(10, 4000);
  request.set_request_id("mine");
  request.mutable_stop()->clear_stop_token_ids();
  script_->next = [](int32_t) { return 5; };
  StreamClient client(stub(), request);
  ASSERT_TRUE(gate.AwaitHeld());
  EXPECT_TRUE(Cancel("mine").ok());
  cancelled = true;
  gate.Open();
  EXPECT_EQ(client.AwaitDone().error_code(), grpc::CANCELLED);
  EXPECT_TRUE(server_->AwaitEmpty());
  EXPECT_EQ(forwards_after, 0);
  EXPECT_EQ(Cancel("mine").error_code(), grpc::NOT_FOUND);
}

TEST_F(GenerationServiceTest, FailingSequenceFailsAlone) {
  script_->on_item = [](const WorkItem& item) {
    return item.request->id == "bad" && item.decode ? absl::InternalError("NaN logits")
                                                    : absl::OkStatus();
  };
  auto bad = Prompt(10, 20);
  bad.set_request_id("bad");
  StreamClient failing(stub(), bad), fine(stub(), Prompt(10, 20));
  const grpc::Status status = failing.AwaitDone();
  EXPECT_EQ(status.error_code(), grpc::INTERNAL);
  EXPECT_EQ(ReasonIn(status), "INTERNAL");
  EXPECT_TRUE(fine.AwaitDone().ok());
  EXPECT_THAT(fine.token_ids(), SizeIs(20));
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, FailedPolicyIsTold) {
  script_->on_settle = [](const WorkItem& item) {
    return item.decode ? WithReason(absl::InternalError("policy 'full' threw"), kPolicyFailed)
                       : absl::OkStatus();
  };
  const grpc::Status status = Refused(Prompt(10, 20));
  EXPECT_EQ(status.error_code(), grpc::INTERNAL);
  EXPECT_EQ(ReasonIn(status), "POLICY_FAILED");
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, FailedForwardFailsOnlyTheGuilty) {
  script_->on_forward = [](absl::Span<const WorkItem> items) {
    for (const WorkItem& item : items) {
      if (item.request->id == "bad") return absl::InternalError("forward threw");
    }
    return absl::OkStatus();
  };
  auto bad = Prompt(10, 20);
  bad.set_request_id("bad");
  StreamClient failing(stub(), bad), fine(stub(), Prompt(10, 20));
  EXPECT_EQ(failing.AwaitDone().error_code(), grpc::INTERNAL);
  EXPECT_TRUE(fine.AwaitDone().ok());
  EXPECT_THAT(fine.token_ids(), SizeIs(20));
}

// A stream whose client reads nothing: its words are 8 KiB, so that they fill the transport.
TEST_F(GenerationServiceTest, SlowReaderIsCancelledAndSlowsNobody) {
  script_->next = [](int32_t token) { return token % 60 + 1; };
  std::atomic<int> missed{0};
  std::atomic<int64_t> neighbour_steps{0};
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    bool neighbour = false;
    for (const WorkItem& item : items) neighbour |= item.request->id == "neighbour";
    // From its first step to its last one, it is in each.
    const int64_t steps = neighbour_steps;
    if (!neighbour && steps > 0 && steps < 1500) ++missed;
    if (neighbour) ++neighbour_steps;
    return absl::OkStatus();
  };
  Start({.word_bytes = 8192,
         .outbox = {.max_messages = 4, .max_bytes = 32768, .stall = absl::Milliseconds(300)}});
  auto slow = Prompt(10, 4000);
  slow.set_request_id("slow");
  StreamClient stuck(stub(), slow, /*reads=*/1);
  stuck.AwaitMessages(1);
  // Paused, not ended: its outbox is full.
  ASSERT_TRUE(server_->observer().AwaitStep(
      [](const StepStats& step) { return step.sequences == 0 && step.running == 1; }));
  auto request = Prompt(10, 1500);
  request.set_request_id("neighbour");
  request.mutable_output()->set_text(false);
  StreamClient neighbour(*v1::GenerationService::NewStub(server_->Connect()), request);
  EXPECT_TRUE(neighbour.AwaitDone().ok());
  EXPECT_THAT(neighbour.token_ids(), SizeIs(1500));
  EXPECT_EQ(missed, 0);
  EXPECT_TRUE(server_->AwaitEmpty());
  stuck.ReadOn();
  const grpc::Status status = stuck.AwaitDone();
  // After twice the limit the stream is cut, and the client hears of that alone.
  EXPECT_TRUE(ReasonIn(status) == "SLOW_READER" || status.error_code() == grpc::CANCELLED)
      << status.error_message();
}

TEST_F(GenerationServiceTest, ReaderThatReturnsInTimeGetsEverything) {
  script_->next = [](int32_t token) { return token % 60 + 1; };
  Start({.word_bytes = 8192, .outbox = {.max_messages = 4, .max_bytes = 32768}});
  StreamClient client(stub(), Prompt(10, 200), /*reads=*/1);
  client.AwaitMessages(1);
  ASSERT_TRUE(server_->observer().AwaitStep(
      [](const StepStats& step) { return step.sequences == 0 && step.running == 1; }));
  client.ReadOn();
  EXPECT_TRUE(client.AwaitDone().ok());
  EXPECT_THAT(client.token_ids(), SizeIs(200));
  EXPECT_TRUE(server_->AwaitEmpty());
}

TEST_F(GenerationServiceTest, DrainFinishesStreamsAndRefusesNewOnes) {
  Gate gate;
  script_->on_forward = [&](absl::Span<const WorkItem> items) {
    gate.Pass(items[0].decode);
    return absl::OkStatus();
  };
  StreamClient running(stub(), Prompt(10, 30));
  ASSERT_TRUE(gate.AwaitHeld());
  server_->engine().StartDraining();
  const grpc::Status status = Refused(Prompt(10, 3));
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE);
  EXPECT_EQ(ReasonIn(status), "DRAINING");
  EXPECT_TRUE(Detail<v1::RetryInfo>(status, "RetryInfo").has_value());
  gate.Open();
  server_->engine().Drain(absl::Now() + kGenerous);
  EXPECT_TRUE(running.AwaitDone().ok());
  EXPECT_THAT(running.token_ids(), SizeIs(30));
}

TEST_F(GenerationServiceTest, DrainCancelsWhatIsLeftAtItsDeadline) {
  script_->next = [](int32_t) { return 5; };
  StreamClient endless(stub(), Prompt(10, 4000));
  endless.AwaitMessages(2);
  server_->engine().Drain(absl::Now());
  const grpc::Status status = endless.AwaitDone();
  EXPECT_TRUE(server_->AwaitEmpty());
  if (status.ok()) return;  // it ended first
  EXPECT_EQ(status.error_code(), grpc::UNAVAILABLE) << status.error_message();
  EXPECT_EQ(ReasonIn(status), "DRAINING");
  EXPECT_TRUE(Detail<v1::RetryInfo>(status, "RetryInfo").has_value());
}

}  // namespace generation_load_test
}  // namespace epikv
