// SPDX-License-Identifier: Apache-2.0
// What comes behind what: streams, captures, the end of an optimizer, on a device that notes it.
#include <catch2/catch_test_macros.hpp>
#include <catch2/generators/catch_generators.hpp>
#include <support/ordered_device.hpp>
#include <support/small_engine.hpp>

#include <cmath>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

using namespace test;

namespace {

using Stream = OrderedDevice::Stream;
constexpr Stream main_stream{1};
constexpr Stream other_stream{2};
constexpr Stream third_stream{3};

template <class Sharding = so::FlatSharding, class Link = OrderedLink<>>
using Ordered = so::ZeroOptimizer<so::SGD, Sharding, Link, so::FullPrecision>;

/// An engine of two parameters in two buckets, its parts in the order in which they must go.
template <class Optimizer = Ordered<>, class Link = OrderedLink<>>
struct Rig {
  explicit Rig(const so::ParameterTable& table = table_of_sizes({256, 300}),
               typename Optimizer::Config config = {}) {
    config.sharding.bucket_bytes = 1024;
    optimizer.emplace(table, config, Link(log, link), so::FlatBuffers{parameters.data(), gradients.data()},
                      main_stream);
  }

  std::vector<float> parameters = std::vector<float>(600, 1.0f);
  std::vector<float> gradients = std::vector<float>(600, 0.5f);
  std::shared_ptr<OrderLog> log = std::make_shared<OrderLog>();
  std::shared_ptr<LinkState> link = std::make_shared<LinkState>();
  std::optional<Optimizer> optimizer;
};

}  // namespace

TEST_CASE("The halves of a step may come on different streams", "[zero][host]") {
  Rig<> rig;
  rig.optimizer->reduce({}, main_stream);
  rig.optimizer->apply({}, other_stream);
  CHECK(comes_behind(rig.log->last("DecideStep"), rig.log->last("MeasureStep")));
  rig.optimizer->reduce({}, third_stream);
  CHECK(comes_behind(rig.log->last("MeasureStep"), rig.log->last("DecideStep")));
  rig.optimizer->discard(main_stream);
  CHECK(comes_behind(rig.log->last("DecideStep"), rig.log->last("MeasureStep")));
}

TEST_CASE("set_rule on any stream comes behind the last step and before the next", "[zero][host]") {
  Rig<> rig;
  rig.optimizer->step({}, main_stream);
  rig.optimizer->set_rule("default", {.lr = 0.5}, other_stream);
  CHECK(comes_behind(rig.log->last("AssignRule"), rig.log->last("update")));
  rig.optimizer->step({}, third_stream);
  CHECK(comes_behind(rig.log->last("OpenStep"), rig.log->last("AssignRule")));
  CHECK(comes_behind(rig.log->last("DecideStep"), rig.log->last("AssignRule")));
}

TEST_CASE("counters and last_result on any stream come behind the last step", "[zero][host]") {
  Rig<> rig;
  rig.optimizer->step({}, main_stream);
  CHECK(rig.optimizer->counters(other_stream).iteration == 1);
  CHECK(comes_behind(rig.log->last("download"), rig.log->last("update")));
  CHECK(rig.optimizer->last_result(third_stream).get().iteration == 1);
  CHECK(comes_behind(rig.log->last("ReadResult"), rig.log->last("DecideStep")));
  rig.optimizer->step({}, main_stream);
  CHECK(comes_behind(rig.log->last("MeasureStep"), rig.log->last("ReadResult")));
}

TEST_CASE("verify_parameters sees what its stream has written, and what the last step has", "[zero][host]") {
  Rig<> rig;
  rig.optimizer->step({}, main_stream);
  rig.log->note("the engine writes", other_stream.id, [] {});
  rig.optimizer->verify_parameters(other_stream);
  CHECK(comes_behind(rig.log->last("download"), rig.log->last("the engine writes")));
  CHECK(comes_behind(rig.log->last("download"), rig.log->last("update")));
}

TEST_CASE("A gradient announced on an idle stream is not summed before the last step's sums are cleared",
          "[zero][host]") {
  Rig<> rig;
  rig.optimizer->reduce({}, main_stream);
  rig.optimizer->discard(main_stream);
  rig.optimizer->gradient_ready(so::ParameterId{1}, other_stream);
  CHECK(comes_behind(rig.log->last("add_squares"), rig.log->last("MeasureStep")));
  Rig<Ordered<so::Replicated>> replicated;
  replicated.optimizer->step({}, main_stream);
  replicated.optimizer->gradient_ready(so::ParameterId{1}, other_stream);
  CHECK(comes_behind(replicated.log->last("add_squares"), replicated.log->last("MeasureStep")));
}

TEST_CASE("The next step's reductions wait for nothing that comes behind the last gather", "[zero][host]") {
  Rig<> rig;
  rig.optimizer->step({}, main_stream);
  rig.log->note("forward", main_stream.id, [] {});
  rig.optimizer->zero_gradients(main_stream);
  rig.log->note("backward", other_stream.id, [] {});
  rig.optimizer->gradient_ready(so::ParameterId{1}, other_stream);
  CHECK(comes_behind(rig.log->last("add_squares"), rig.log->last("backward")));
  CHECK_FALSE(comes_behind(rig.log->last("add_squares"), rig.log->last("forward")));
}

TEST_CASE("An optimizer goes when all that it enqueued is done, on whichever stream", "[zero][host][B077]") {
  using Do = std::function<void(Rig<>&)>;
  const auto [name, action] = GENERATE(table<std::string, Do>(
      {{"a step", [](Rig<>& r) { r.optimizer->step({}, main_stream); }},
       {"half a step", [](Rig<>& r) { r.optimizer->reduce({}, other_stream); }},
       {"a discarded step",
        [](Rig<>& r) {
          r.optimizer->reduce({}, main_stream);
          r.optimizer->discard(other_stream);
        }},
       {"zeroing",
        [](Rig<>& r) {
          r.optimizer->step({}, main_stream);
          r.optimizer->zero_gradients(other_stream);
          r.optimizer->zero_gradients(third_stream);
        }},
       {"inputs", [](Rig<>& r) { r.optimizer->set_inputs(0.5f, 1.0f, other_stream); }},
       {"a result", [](Rig<>& r) { static_cast<void>(r.optimizer->last_result(other_stream)); }},
       {"a rule", [](Rig<>& r) { r.optimizer->set_rule("default", {}, other_stream); }},
       {"masters", [](Rig<>& r) { r.optimizer->refresh_masters(other_stream); }},
       {"a failing gather",
        [](Rig<>& r) {
          r.log->fail_in = "all_gather";
          r.log->fail_at = 2;
          CHECK_THROWS_AS(r.optimizer->step({}, main_stream), so::Error);
          CHECK(r.link->aborted);
        }},
       {"a failing decision",
        [](Rig<>& r) {
          r.log->fail_in = "DecideStep";
          r.log->fail_at = 1;
          CHECK_THROWS_AS(r.optimizer->step({}, main_stream), so::Error);
        }},
       {"a failing capture",
        [](Rig<>& r) {
          r.optimizer->step({}, main_stream);
          r.log->begin_capture(main_stream.id);
          r.log->fail_in = "DecideStep";
          r.log->fail_at = 1;
          CHECK_THROWS_AS(r.optimizer->step({}, main_stream), so::Error);
          r.log->end_capture();
        }},
       {"a captured step",
        [](Rig<>& r) {
          r.optimizer->step({}, other_stream);
          r.log->begin_capture(main_stream.id);
          r.optimizer->step({}, main_stream);
          r.log->end_capture();
          r.optimizer->set_inputs(0.5f, 1.0f, main_stream);
          r.log->replay();
        }}}));
  CAPTURE(name);
  Rig<> rig;
  // Each stream has ended once before: that does not count.
  for (const Stream stream : {main_stream, other_stream, third_stream}) rig.optimizer->zero_gradients(stream);
  action(rig);
  rig.optimizer.reset();
  CHECK(rig.log->allocated == 0);
  CHECK_FALSE(rig.log->freed_early);
}

TEST_CASE("Memory that may be used for ever is left to the process", "[zero][host]") {
  Rig<> rig;
  rig.optimizer->step({}, main_stream);
  rig.link->may_abort = false;
  rig.log->fail_in = "all_reduce";
  rig.log->fail_at = 1;
  CHECK_THROWS_AS(rig.optimizer->step({}, main_stream), so::Error);
  CHECK_THROWS_AS(rig.optimizer->counters(main_stream), so::Error);
  rig.optimizer.reset();
  CHECK(rig.log->allocated == 2);
}

TEST_CASE("The counters of a broken optimizer can be read where its work has ended", "[zero][host]") {
  Rig<> rig;
  rig.optimizer->step({}, main_stream);
  rig.log->fail_in = "all_reduce";
  rig.log->fail_at = 1;
  CHECK_THROWS_AS(rig.optimizer->step({}, main_stream), so::Error);
  CHECK(rig.optimizer->counters(main_stream).iteration == 1);
}

TEST_CASE("A ticket that outlives its optimizer keeps nothing of the collective alive", "[zero][host]") {
  Rig<> rig;
  const so::StepTicket ticket = rig.optimizer->step({}, main_stream);
  CHECK(rig.link.use_count() > 1);
  rig.optimizer.reset();
  CHECK(rig.link.use_count() == 1);
  CHECK(message_of<so::Error>([&] { static_cast<void>(ticket.get()); }).find("is gone") != std::string::npos);
}

TEST_CASE("A start that fails on one rank alone is told to the others, and frees what it can",
          "[zero][law9][host]") {
  const bool may_abort = GENERATE(true, false);
  const std::string where = GENERATE("exchange", "upload", "InitializeStep");
  CAPTURE(may_abort, where);
  Rig<> rig;
  rig.optimizer.reset();
  rig.log->fail_in = where;
  rig.log->fail_at = 1;
  rig.link->may_abort = may_abort;
  CHECK(message_of<so::Error>([&] {
          rig.optimizer.emplace(table_of_sizes({256}), Ordered<>::Config{}, OrderedLink<>(rig.log, rig.link),
                                so::FlatBuffers{rig.parameters.data(), rig.gradients.data()}, main_stream);
        }).find(where) != std::string::npos);
  CHECK(rig.link->told.find(where) != std::string::npos);
  CHECK(rig.log->allocated == (may_abort ? 0 : 2));
  CHECK_FALSE(rig.log->freed_early);
}

TEST_CASE("A capture cannot ask for a result, for counters, or change what is outside it",
          "[zero][law9][host]") {
  using Call = std::function<void(Ordered<>&)>;
  const auto [name, call] = GENERATE(table<std::string, Call>(
      {{"last_result", [](auto& o) { static_cast<void>(o.last_result(main_stream)); }},
       {"counters", [](auto& o) { static_cast<void>(o.counters(main_stream)); }},
       {"set_rule", [](auto& o) { o.set_rule("default", {}, main_stream); }},
       {"set_counters", [](auto& o) { o.set_counters({}, main_stream); }},
       {"set_states", [](auto& o) { o.set_states({}, {}, main_stream); }},
       {"synchronize", [](auto& o) { o.synchronize(main_stream); }},
       {"gather_state", [](auto& o) { static_cast<void>(o.gather_state(0, main_stream)); }},
       {"restore_parameters", [](auto& o) { o.restore_parameters(main_stream); }},
       {"refresh_masters", [](auto& o) { o.refresh_masters(main_stream); }},
       {"verify_parameters", [](auto& o) { o.verify_parameters(main_stream); }}}));
  Rig<> rig;
  rig.log->begin_capture(main_stream.id);
  const std::int64_t before = rig.log->enqueued;
  CHECK(message_of<std::logic_error>([&, c = call] {
          c(*rig.optimizer);
        }).find(name + " in a stream capture") != std::string::npos);
  CHECK(rig.log->enqueued == before);
  rig.log->end_capture();
  CHECK(rig.optimizer->step({}, main_stream).get().iteration == 1);
}

TEST_CASE("Before the first step the last result is none", "[zero][host]") {
  Rig<> rig;
  const so::StepResult result = rig.optimizer->last_result(main_stream).get();
  CHECK(result.iteration == 0);
  CHECK(result.updates == 0);
  CHECK(result.norm == 0);
  CHECK(result.clip_factor == 1);
  CHECK(result.loss_scale == 1);
  CHECK_FALSE((result.skipped || result.inputs_differ));
}

TEST_CASE("A step is captured whole or not at all", "[zero][law9][host]") {
  Rig<> rig;
  const auto refusal = [&](const auto& call) { return message_of<std::logic_error>(call); };
  rig.optimizer->reduce({}, main_stream);
  rig.log->begin_capture(main_stream.id);
  CHECK(refusal([&] { rig.optimizer->apply({}, main_stream); }).find("same stream capture") !=
        std::string::npos);
  CHECK(refusal([&] { rig.optimizer->discard(main_stream); }).find("same stream capture") !=
        std::string::npos);
  rig.log->end_capture();
  rig.optimizer->apply({}, main_stream);
  rig.optimizer->gradient_ready(so::ParameterId{1}, other_stream);
  rig.log->begin_capture(main_stream.id);
  CHECK(refusal([&] { rig.optimizer->step({}, main_stream); }).find("outside the stream capture") !=
        std::string::npos);
  rig.log->end_capture();
  rig.optimizer->step({}, main_stream);
  rig.log->begin_capture(main_stream.id);
  rig.optimizer->reduce({}, main_stream);
  rig.log->end_capture();
  CHECK(refusal([&] { rig.optimizer->apply({}, main_stream); }).find("same stream capture") !=
        std::string::npos);
}

TEST_CASE("A capture waits for parameters that it has gathered itself, or that were waited for before",
          "[zero][law9][host]") {
  Rig<> rig;
  const so::ParameterId first{0};
  rig.log->begin_capture(main_stream.id);
  rig.optimizer->wait_parameters(main_stream);  // nothing was gathered yet
  rig.log->end_capture();
  rig.optimizer->step({}, main_stream);
  const auto refused = [&](const auto& call) {
    rig.log->begin_capture(main_stream.id);
    const std::int64_t before = rig.log->enqueued;
    const bool result =
        message_of<std::logic_error>(call).find("cannot wait for parameters") != std::string::npos;
    CHECK(rig.log->enqueued == before);
    rig.log->end_capture();
    return result;
  };
  CHECK(refused([&] { rig.optimizer->wait_parameters(first, main_stream); }));
  rig.optimizer->wait_parameters(first, main_stream);
  CHECK_FALSE(refused([&] { rig.optimizer->wait_parameters(first, main_stream); }));
  CHECK(refused([&] { rig.optimizer->wait_parameters(main_stream); }));
  rig.optimizer->wait_parameters(main_stream);
  CHECK_FALSE(refused([&] { rig.optimizer->wait_parameters(main_stream); }));
  rig.optimizer->step({}, main_stream);
  CHECK(refused([&] { rig.optimizer->wait_parameters(first, main_stream); }));
  rig.log->begin_capture(main_stream.id);
  rig.optimizer->step({}, main_stream);
  rig.optimizer->wait_parameters(main_stream);
  rig.log->end_capture();
  // Nothing of the capture (three gathers) has run yet: outside, a wait is for the step before it.
  rig.optimizer->wait_parameters(third_stream);
  rig.log->note("a reader", third_stream.id, [] {});
  CHECK(comes_behind(rig.log->last("a reader"), rig.log->last("all_gather", 4)));
  rig.optimizer->set_inputs(1, 1.0f, other_stream);
  CHECK(comes_behind(rig.log->last("SetFactors"), rig.log->last("all_gather", 4)));
}

TEST_CASE("Over a collective that cannot be captured a capture is refused before anything is enqueued",
          "[zero][law9][host]") {
  using Link = OrderedLink<false>;
  Rig<Ordered<so::FlatSharding, Link>, Link> rig;
  rig.log->begin_capture(main_stream.id);
  const std::int64_t before = rig.log->enqueued;
  for (const std::string& text :
       {message_of<std::logic_error>([&] { rig.optimizer->step({}, main_stream); }),
        message_of<std::logic_error>([&] { rig.optimizer->reduce({}, main_stream); }),
        message_of<std::logic_error>(
            [&] { rig.optimizer->gradient_ready(so::ParameterId{0}, main_stream); })}) {
    CHECK(text.find("ordered link cannot be captured") != std::string::npos);
  }
  CHECK(rig.log->enqueued == before);
  rig.log->end_capture();
  CHECK(rig.optimizer->step({}, main_stream).get().iteration == 1);
}

TEST_CASE("A captured step without a parameter forks the collective's stream and joins it again",
          "[zero][host]") {
  Rig<> rig{so::ParameterTable{}};
  rig.log->begin_capture(main_stream.id);
  rig.optimizer->step({}, main_stream);
  CHECK(rig.log->last("OpenStep").capture != 0);
  rig.log->note("the rest", main_stream.id, [] {});
  CHECK(comes_behind(rig.log->last("the rest"), rig.log->last("all_reduce")));
  rig.log->end_capture();
  rig.log->replay();
  rig.log->replay();
  CHECK(rig.optimizer->last_result(main_stream).get().iteration == 2);
}

TEST_CASE("A captured step that was never replayed has counted nothing", "[zero][host]") {
  Rig<> rig;
  rig.optimizer->step({}, main_stream);
  rig.log->begin_capture(main_stream.id);
  rig.log->fail_in = "update";
  rig.log->fail_at = 1;
  CHECK_THROWS_AS(rig.optimizer->step({}, main_stream), so::Error);
  rig.log->end_capture();
  CHECK(rig.optimizer->counters(main_stream).iteration == 1);
}

TEST_CASE("Replays work with the rules of their time", "[zero][host]") {
  Rig<> rig;
  rig.log->begin_capture(main_stream.id);
  rig.optimizer->step({}, main_stream);
  rig.log->end_capture();
  rig.optimizer->set_rule("default", {.lr = 0.5}, main_stream);
  rig.log->replay();
  CHECK(rig.parameters[0] == 0.75f);
  rig.optimizer->set_rule("default", {.lr = 1}, main_stream);
  rig.gradients.assign(600, 0.5f);
  rig.log->replay();
  CHECK(rig.parameters[0] == 0.25f);
}

TEST_CASE("A gradient scale in device memory is read behind the step's stream", "[zero][host]") {
  Rig<> rig;
  float scale = 0;
  rig.optimizer->gradient_ready(so::ParameterId{0}, other_stream);
  rig.optimizer->gradient_ready(so::ParameterId{1}, other_stream);
  rig.log->note("the engine's scale", main_stream.id, [&] { scale = 2; });
  rig.optimizer->step({.gradient_scale = &scale}, main_stream);
  CHECK(comes_behind(rig.log->last("OpenStep"), rig.log->last("the engine's scale")));
}

TEST_CASE("A failed set_rule leaves the rule that the device has", "[zero][host]") {
  Rig<> rig;
  rig.log->fail_in = "AssignRule";
  rig.log->fail_at = 1;
  CHECK_THROWS_AS(rig.optimizer->set_rule("default", {.lr = 0.5}, main_stream), so::Error);
  CHECK(rig.optimizer->rule("default").lr == so::SGD{}.lr);
}
