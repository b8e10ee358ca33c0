#include "hcp/command_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "hcp/command_line_parts.h"
#include "hybridcp/error.h"

namespace hybridcp::cli {

namespace {

void add_train(CLI::App& app, Request& request) {
    CLI::App* command = app.add_subcommand("train", "Train as a recipe says");
    command->add_option("recipe", request.train.recipe_path, "the recipe, YAML")->required();
    command->add_option("overrides", request.train.overrides, kOverrideHelp);
    add_nproc(command, request);
    examples(
        command,
        "  hcp train recipes/demo.yaml --nproc 4\n"
        "  hcp train recipes/demo.yaml --nproc 4 train.steps=20 train.optimizer.lr=1e-3\n"
        "  hcp train recipes/demo.yaml --nproc 4 train.accelerator.dp=2 train.accelerator.cp=2\n"
        "  torchrun --no-python --nproc-per-node 4 hcp train recipes/demo.yaml\n"
        "A run that was stopped (Ctrl-C, SIGTERM) goes on from its checkpoint when started again.");
    command->callback([&request] { request.command = Command::kTrain; });
}

void add_verify_model(CLI::App& verify, Request& request) {
    CLI::App* command = verify.add_subcommand(
        "model", "A Hugging Face folder's forward and backward pass, recorded");
    VerifyModelOptions& options = request.verify_model;
    command->add_option("folder", options.model_folder, "config.json and *.safetensors")
        ->required();
    command->add_option("overrides", options.overrides, kOverrideHelp);
    command->add_option("--batch", options.batch_path, "input_ids, targets [, cu_seqlens]")
        ->required();
    command->add_option("--expected", options.expected_path, "loss, hidden.norm, grad.NAME, ...")
        ->required();
    command->add_option("--dtype", options.dtype, "fp32 (default) or bf16");
    command->add_option("--router-aux-loss-coef", options.router_aux_loss_coef,
                        "of a model with experts (default: the case's in the manifest beside the "
                        "model or the case, else config.json's)");
    command->add_flag(
        "--against-one-rank", options.against_one_rank,
        "compute on one rank too: the error may be twice as large, or a quarter of the bar");
    add_report(command, options.report_path, "write the table as JSON to this file");
    add_nproc(command, request);
    examples(command,
             "  D=tests/golden/models/dense_tiny\n"
             "  hcp verify model $D --batch $D/packed/batch.safetensors --expected "
             "$D/packed/expected.safetensors \\\n"
             "      --nproc 3 train.accelerator.linear_attention_cp_mode=p2p \\\n"
             "      train.accelerator.full_attention_cp_mode=all_gather");
    command->callback([&request] { request.command = Command::kVerifyModel; });
}

void add_verify_trajectory(CLI::App& verify, Request& request) {
    CLI::App* command =
        verify.add_subcommand("trajectory", "A recorded training run, step by step");
    VerifyTrajectoryOptions& options = request.verify_trajectory;
    command->add_option("folder", options.folder, "manifest.json, tokens, trace, final")
        ->required();
    command->add_option("overrides", options.overrides, kOverrideHelp);
    command->add_option("--model", options.model_folder, "the model that the run starts from")
        ->required();
    add_report(command, options.report_path, "write the table as JSON to this file");
    add_nproc(command, request);
    examples(command,
             "  hcp verify trajectory tests/golden/trajectories/dense_tiny --model "
             "tests/golden/models/dense_tiny\n"
             "  hcp verify trajectory tests/golden/trajectories/dense_tiny --model "
             "tests/golden/models/dense_tiny \\\n"
             "      --nproc 4 train.accelerator.dp=2 train.accelerator.cp=2");
    command->callback([&request] { request.command = Command::kVerifyTrajectory; });
}

void add_verify_parallel(CLI::App& verify, Request& request) {
    CLI::App* command =
        verify.add_subcommand("parallel", "A recipe on all ranks against the same on one rank");
    VerifyParallelOptions& options = request.verify_parallel;
    command->add_option("recipe", options.recipe_path, "the recipe, YAML")->required();
    command->add_option("overrides", options.overrides, kOverrideHelp);
    command->add_flag(
        "--chunk-bar", options.chunk_bar,
        "a third run, with another chunk size on one rank: twice its difference may be the bar");
    add_report(command, options.report_path, "write the table as JSON to this file");
    add_nproc(command, request);
    examples(
        command,
        "  hcp verify parallel recipes/parity.yaml --nproc 4\n"
        "  hcp verify parallel recipes/parity.yaml --nproc 8 --chunk-bar --report parity.json\n"
        "On several machines TMPDIR must be a folder that all of them share.");
    command->callback([&request] { request.command = Command::kVerifyParallel; });
}

void add_export(CLI::App& app, Request& request) {
    CLI::App* command =
        app.add_subcommand("export", "Write a checkpoint's model in Hugging Face's format");
    ExportRequest& options = request.export_checkpoint;
    command
        ->add_option("checkpoint", options.checkpoint,
                     "a checkpoint, or a folder of them: its newest")
        ->required();
    command->add_option("folder", options.folder, "where config.json and model.safetensors go")
        ->required();
    command->add_option("--dtype", options.dtype, "fp32 or bf16")->capture_default_str();
    examples(command, "  hcp export runs/demo exported/demo --dtype bf16");
    command->callback([&request] { request.command = Command::kExport; });
}

void add_verify_op(CLI::App& verify, Request& request) {
    CLI::App* op = verify.add_subcommand(
        "op", "One operator against golden cases (ops/NAME/CASE.safetensors)");
    VerifyOpOptions& options = request.verify_op;
    op->add_option("name", options.op, "gdn, conv1d, gated_rmsnorm, gated_attention, ...")
        ->required();
    op->add_option("files", options.files, "golden cases, their manifest.json beside them")
        ->required();
    op->add_option("--backend", options.backend, "eager, fused, or reference (fp64)")
        ->capture_default_str();
    op->add_option("--dtype", options.dtype, "fp32 or bf16")->capture_default_str();
    op->add_option("--device", options.device, "cpu or cuda")->capture_default_str();
    op->add_option("--chunk", options.chunk_size, "gdn: tokens a chunk")->capture_default_str();
    add_report(op, options.report_path, "write the tables as JSON to this file");
    examples(op,
             "  hcp verify op gdn tests/golden/ops/gdn/*.safetensors\n"
             "  hcp verify op gdn tests/golden/ops/gdn/cp4.safetensors --backend reference\n"
             "  hcp verify op conv1d tests/golden/ops/conv1d/varlen.safetensors --dtype bf16 "
             "--report r.json");
    op->callback([&request] { request.command = Command::kVerifyOp; });
}

void add_inspect_layout(CLI::App& inspect, Request& request) {
    CLI::App* command = inspect.add_subcommand(
        "layout", "Which rank holds which tokens, its causal work, and what conversions move");
    InspectLayoutOptions& options = request.inspect_layout;
    command->add_option("recipe", options.recipe_path,
                        "a recipe: its ranks, layout, and the documents of its first batch");
    command->add_option("overrides", options.overrides, kOverrideHelp);
    command->add_option("--ranks", options.num_ranks, "without a recipe: ranks");
    comma_separated(command->add_option("--documents", options.document_lengths,
                                        "without a recipe: tokens of each document"));
    command->add_option("--sequence-length", options.sequence_length,
                        "without a recipe: tokens of the one document");
    command->add_option("--cut", options.cut, "without a recipe: document (default) or row");
    comma_separated(command->add_option(
        "--kind", options.kinds, "contiguous, zigzag, folded (default: all, or the recipe's)"));
    command->add_option("--color", options.color, "auto, always or never")->capture_default_str();
    command->add_option("--width", options.width, "columns (default: the terminal's, else 80)");
    command->add_option("--svg", options.svg_path, "write the picture as SVG to this file");
    command->add_option("--json", options.json_path, "write the numbers as JSON to this file");
    examples(command,
             "  hcp inspect layout --ranks 4 --documents 4096,1000,0,17\n"
             "  hcp inspect layout --ranks 8 --sequence-length 262144 --kind zigzag,folded --svg "
             "layout.svg\n"
             "  hcp inspect layout recipes/demo.yaml train.accelerator.cp=8 --json layout.json");
    command->callback([&request] { request.command = Command::kInspectLayout; });
}

void add_inspect_checkpoint(CLI::App& inspect, Request& request) {
    CLI::App* command = inspect.add_subcommand(
        "checkpoint", "What a checkpoint holds, who saved it, and whether it is undamaged");
    command
        ->add_option("folder", request.inspect_checkpoint.folder,
                     "a checkpoint, or a folder of them")
        ->required();
    examples(command,
             "  hcp inspect checkpoint runs/demo\n"
             "  hcp inspect checkpoint runs/demo/step-00000050\n"
             "Every byte is checked; the exit status is 1 when one is damaged.");
    command->callback([&request] { request.command = Command::kInspectCheckpoint; });
}

void add_plan(CLI::App& app, Request& request) {
    CLI::App* command =
        app.add_subcommand("plan", "What a recipe's step takes on each rank, by class");
    PlanOptions& options = request.plan;
    command->add_option("recipe", options.recipe_path, "the recipe, YAML")->required();
    command->add_option("overrides", options.overrides, kOverrideHelp);
    command->add_option("--hbm", options.hbm,
                        "a device's memory: 80GB; exit status 1 where it does not do");
    command->add_option("--nproc", options.num_ranks, "so many ranks will be started; checked");
    command->add_option("--color", options.color, "auto, always or never")->capture_default_str();
    add_report(command, options.report_path, "write the numbers as JSON to this file");
    examples(command,
             "  hcp plan recipes/demo.yaml --hbm 2GB\n"
             "  hcp plan recipes/plan_35b_256k.yaml --hbm 53.3GB\n"
             "  hcp plan recipes/plan_35b_256k.yaml train.accelerator.cp=8 --hbm 80GB --report "
             "plan.json");
    command->callback([&request] { request.command = Command::kPlan; });
}

void add_version(CLI::App& app, Request& request) {
    CLI::App* version =
        app.add_subcommand("version", "Version of hcp and of the libraries it runs on");
    examples(version, "  hcp version");
    version->callback([&request] { request.command = Command::kVersion; });
}

std::vector<std::string> names(const CLI::App& app) {
    std::vector<std::string> all;
    for (const CLI::App* command : app.get_subcommands({})) {
        all.push_back(command->get_name());
    }
    return all;
}

// CLI11 reports an unknown command as a surplus argument; say which one was meant.
void check_command_word(const CLI::App& app, const std::string& path, const std::string& word) {
    const auto known = names(app);
    if (word.empty() || word[0] == '-' ||
        std::find(known.begin(), known.end(), word) != known.end()) {
        return;
    }
    throw UsageError(fmt::format("unknown command '{} {}': did you mean {}? (known: {})", path,
                                 word, nearest_word(word, known), fmt::join(known, ", ")));
}

std::string command_path(const CLI::App& app) {
    std::string path = "hcp";
    const CLI::App* level = &app;
    while (!level->get_subcommands().empty()) {
        level = level->get_subcommands().front();
        path += " " + level->get_name();
    }
    return path;
}

const CLI::App& deepest(const CLI::App& app) {
    const CLI::App* level = &app;
    while (!level->get_subcommands().empty()) {
        level = level->get_subcommands().front();
    }
    return *level;
}

/// The flag of the command that an unknown one was meant to be; empty when no flag is unknown.
std::string nearest_flag(const CLI::App& app) {
    std::vector<std::string> known;
    for (const CLI::Option* option : deepest(app).get_options()) {
        for (const std::string& name : option->get_lnames()) {
            known.push_back("--" + name);
        }
    }
    for (const std::string& word : app.remaining(/*recurse=*/true)) {
        if (word.rfind("--", 0) == 0) {
            return nearest_word(word.substr(0, word.find('=')), known);
        }
    }
    return "";
}

std::string one_line(std::string text) {
    for (char& c : text) {
        c = c == '\n' ? ' ' : c;
    }
    return text;
}

}  // namespace

std::optional<Request> parse_command_line(const std::vector<std::string>& arguments) {
    Request request;
    CLI::App app("HybridCP: trains hybrid transformers by context parallelism", "hcp");
    app.require_subcommand(1);
    add_train(app, request);
    CLI::App* verify =
        app.add_subcommand("verify", "Compare with reference numbers: exit status 1 if any is off");
    verify->require_subcommand(1);
    add_verify_op(*verify, request);
    add_verify_model(*verify, request);
    add_verify_trajectory(*verify, request);
    add_verify_parallel(*verify, request);
    add_export(app, request);
    CLI::App* inspect = app.add_subcommand("inspect", "Show what a run would do, or has done");
    inspect->require_subcommand(1);
    add_inspect_layout(*inspect, request);
    add_inspect_checkpoint(*inspect, request);
    CLI::App* bench = app.add_subcommand("bench", "Measure, after the result is verified");
    bench->require_subcommand(1);
    add_bench_commands(*bench, request);
    add_plan(app, request);
    add_version(app, request);
    if (!arguments.empty()) {
        check_command_word(app, "hcp", arguments[0]);
        for (const CLI::App* group : {verify, inspect, bench}) {
            if (arguments[0] == group->get_name() && arguments.size() > 1) {
                check_command_word(*group, "hcp " + arguments[0], arguments[1]);
            }
        }
    }
    try {
        std::vector<std::string> reversed(arguments.rbegin(), arguments.rend());
        app.parse(reversed);  // CLI11 wants them from the last to the first
    } catch (const CLI::Success& help) {
        (void)app.exit(help);
        return std::nullopt;
    } catch (const CLI::ExtrasError& error) {
        const std::string flag = nearest_flag(app);
        const std::string path = command_path(app);
        throw UsageError(fmt::format("{}{} ({} --help shows how)", one_line(error.what()),
                                     flag.empty() ? "" : ": did you mean " + flag + "?", path));
    } catch (const CLI::ParseError& error) {
        const std::string path = command_path(app);
        throw UsageError(fmt::format("{} ({} --help shows how)", one_line(error.what()), path));
    }
    return request;
}

std::vector<std::string> without_nproc(const std::vector<std::string>& arguments) {
    std::vector<std::string> rest;
    for (std::size_t i = 0; i < arguments.size(); ++i) {
        if (arguments[i] == "--nproc") {
            ++i;
        } else if (arguments[i].rfind("--nproc=", 0) != 0) {
            rest.push_back(arguments[i]);
        }
    }
    return rest;
}

}  // namespace hybridcp::cli
