// The commands under `hcp bench`, as words.
#include <fmt/format.h>

#include "hcp/command_line_parts.h"

namespace hybridcp::cli {

namespace {

/// Of the commands that time training steps.
template <typename Options>
void add_step_options(CLI::App* command, Options& options) {
    command->add_option("--warm-up", options.warm_up, "steps before any is timed")
        ->check(CLI::Range(0, 1000))
        ->capture_default_str();
    command->add_option("--repeats", options.repeats, "timed steps of each variant, by turns")
        ->check(CLI::Range(1, 10000))
        ->capture_default_str();
    add_report(command, options.report_path, "write all numbers as JSON to this file");
}

void add_bench_cp(CLI::App& bench, Request& request) {
    CLI::App* command = bench.add_subcommand(
        "cp", "A training step under each way to run the linear layers, at several rank counts");
    BenchCpOptions& options = request.bench_cp;
    command->add_option("recipe", options.recipe_path, "the recipe, YAML")->required();
    command->add_option("overrides", options.overrides, kOverrideHelp);
    comma_separated(command->add_option("--ranks", options.ranks, "numbers of ranks"))
        ->check(CLI::Range(2, 1024))
        ->capture_default_str();
    comma_separated(command->add_option("--variants", options.variants,
                                        "by name; all that are supported if left out"));
    comma_separated(
        command->add_option("--documents", options.documents,
                            "tokens of each document; one of data.sequence_length if left out"))
        ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 24));
    command->add_option("--level", options.level, "model, or layer: one linear-attention mixer")
        ->capture_default_str();
    add_step_options(command, options);
    command->add_option("--worker-output", options.worker_output)->group("");  // for its own ranks
    examples(command,
             "  hcp bench cp recipes/bench_cp.yaml\n"
             "  hcp bench cp recipes/bench_cp.yaml --ranks 4,8 --variants "
             "gather_hidden,convert,native-p2p --report cp.json\n"
             "  hcp bench cp recipes/bench_cp.yaml --level layer --documents 4096,0,100,2000");
    command->callback([&request] { request.command = Command::kBenchCp; });
}

template <typename Options>
void add_measuring_options(CLI::App* command, Options& options) {
    comma_separated(command->add_option("--dtype", options.dtypes, "fp32, bf16"))
        ->capture_default_str();
    comma_separated(
        command->add_option("--backend", options.backends, "by name (default: all that run here)"));
    comma_separated(command->add_option("--isa", options.isas,
                                        "instruction sets, each a variant of its own of backends "
                                        "that have several; all: what this CPU has"));
    command->add_option("--threads", options.threads, "of every variant")
        ->check(CLI::Range(1, 1024))
        ->capture_default_str();
    command->add_option("--repeats", options.repeats, "timed runs of each variant, by turns")
        ->check(CLI::Range(1, 10000))
        ->capture_default_str();
    add_report(command, options.report_path, "write all numbers as JSON to this file");
}

void add_bench_gdn(CLI::App& bench, Request& request) {
    CLI::App* command =
        bench.add_subcommand("gdn", "The gated delta rule: backends, instruction sets and peers");
    BenchGdnOptions& options = request.bench_gdn;
    comma_separated(command->add_option("--tokens", options.tokens, "lengths of one sequence"))
        ->check(CLI::Range(1, 1 << 24))
        ->capture_default_str();
    const auto add_size = [&](const char* flag, std::int64_t& value, const char* help) {
        command->add_option(flag, value, help)->check(CLI::Range(1, 4096))->capture_default_str();
    };
    add_size("--key-heads", options.key_heads, "heads of q and k");
    add_size("--value-heads", options.value_heads, "heads of v: a multiple");
    add_size("--key-dim", options.key_dim, "features of a head of q and k");
    add_size("--value-dim", options.value_dim, "features of a head of v");
    command
        ->add_option(
            "--gates", options.gates,
            "ls16, zero25 (a quarter of the heads never forgets), none, strong, or qwen (as a "
            "new model has them)")
        ->capture_default_str();
    command->add_option("--device", options.device, "cpu or cuda")->capture_default_str();
    comma_separated(command->add_option("--pass", options.passes,
                                        "forward, backward, summary, gradient_summary"))
        ->capture_default_str();
    comma_separated(command->add_option(
        "--peer", options.peers,
        "hf: Transformers' op, through Python; brgemm: the matrix products alone, as a bound"));
    command->add_option("--python", options.python, "of the peer hf")->capture_default_str();
    command->add_option("--peer-repeats", options.peer_repeats, "timed runs of the peer hf")
        ->check(CLI::Range(1, 10000))
        ->capture_default_str();
    comma_separated(
        command->add_option("--kept-share", options.kept_shares,
                            "of fused on cuda: shares of what backward needs that forward keeps"))
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    add_measuring_options(command, options);
    examples(
        command,
        "  hcp bench gdn\n"
        "  hcp bench gdn --tokens 4096,65536 --dtype bf16 --gates zero25 --pass "
        "forward,backward,summary,gradient_summary\n"
        "  hcp bench gdn --tokens 8192 --peer hf,brgemm --python venv/bin/python3 --report "
        "gdn.json\n"
        "  hcp bench gdn --device cuda --dtype bf16 --backend fused --key-heads 16 --value-heads "
        "32 --repeats 20");
    command->callback([&request] { request.command = Command::kBenchGdn; });
}

void add_bench_op(CLI::App& bench, Request& request, const std::string& name, const char* what) {
    CLI::App* command = bench.add_subcommand(name, what);
    BenchOpOptions& options = request.bench_op;
    command->add_option("--tokens", options.tokens, "rows")
        ->check(CLI::Range(1, 1 << 24))
        ->capture_default_str();
    command
        ->add_option("--width", options.width,
                     "channels, features of all heads, or vocabulary (default: the operator's)")
        ->check(CLI::Range(1, 1 << 24));
    add_measuring_options(command, options);
    examples(command, fmt::format("  hcp bench {0}\n"
                                  "  hcp bench {0} --tokens 16384 --dtype bf16 --report {0}.json",
                                  name));
    command->callback([&request, name] {
        request.command = Command::kBenchOp;
        request.bench_op.op = name;
    });
}

void add_bench_train(CLI::App& bench, Request& request) {
    CLI::App* command = bench.add_subcommand(
        "train", "A whole training step with whole and with sharded parameters");
    BenchTrainOptions& options = request.bench_train;
    command->add_option("recipe", options.recipe_path, "the recipe, YAML")->required();
    command->add_option("overrides", options.overrides, kOverrideHelp);
    add_nproc(command, request);
    comma_separated(
        command->add_option("--variants", options.variants,
                            "whole, sharded, sharded-no-prefetch, whole-full, "
                            "whole-selective, sharded-full; the first is compared with"))
        ->capture_default_str();
    add_step_options(command, options);
    examples(command,
             "  hcp bench train recipes/demo.yaml --nproc 4\n"
             "  hcp bench train recipes/parity.yaml --nproc 4 --variants "
             "whole,whole-full,sharded-full model.num_layers=4");
    command->callback([&request] { request.command = Command::kBenchTrain; });
}

}  // namespace

void add_bench_commands(CLI::App& bench, Request& request) {
    add_bench_cp(bench, request);
    add_bench_train(bench, request);
    add_bench_gdn(bench, request);
    add_bench_op(bench, request, "conv", "Causal convolution and SiLU");
    add_bench_op(bench, request, "norm", "Zero-centred RMS norm");
    add_bench_op(bench, request, "gated_norm", "RMS norm of heads with a SiLU gate");
    add_bench_op(bench, request, "rotary", "Partial rotary embedding");
    add_bench_op(bench, request, "swiglu", "The SwiGLU block; its matrix products timed apart");
    add_bench_op(bench, request, "cross_entropy", "Cross-entropy of given logits");
}

}  // namespace hybridcp::cli
