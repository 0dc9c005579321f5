#!/usr/bin/env python3
"""Mutation testing: change one thing in a module at a time, and check that its tests fail.

A mutant is one change: a different operator, a number off by one, an inverted condition, or a
missing element, statement or check. The mutated module, in Python or in C (mutants_c.py),
replaces the real one in a child process that runs the module's tests until the first failure;
no file is changed. Equivalent mutants are listed, with reasons, in mutants.txt beside this
file.

All mutants of a C file's functions are first built into one module. A process collects the
tests and forks a child for each mutant, which selects it and runs the tests that call its
function, starting with those that have caught other mutants: 0.1 to 0.3 s each. Only a mutant
that survives these, or that is outside functions, is built separately and runs all tests.

mutmut and cosmic-ray do not work here: mutmut copies the package to a place where it cannot
find the compiled module or the command line; cosmic-ray edits the files in place, and starts
a new process for each mutant.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import ctypes
import dataclasses
import functools
import gc
import importlib.abc
import importlib.machinery
import json
import mmap
import os
import pathlib
import resource
import signal
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mutants_c

TESTS = pathlib.Path(__file__).resolve().parent
ROOT = TESTS.parent
EQUIVALENT = TESTS / "mutants.txt"
PROFILE, EXAMPLES = "mutants", 20
"""Hypothesis examples; a mutant that only more examples catch, by chance, needs its own test."""

MOMENTS = "6"
"""How many bytecodes of each verb test_soft_interrupts_at_every_bytecode.py interrupts."""

POSTS = (
    "posting/test_send.py",
    "posting/test_rdma_write_and_read.py",
    "posting/test_atomics.py",
    "posting/test_imm_data.py",
    "posting/test_inline.py",
    "posting/test_fence.py",
    "posting/test_signaled.py",
    "posting/test_sges.py",
    "posting/test_message_sizes.py",
    "posting/test_error_completions.py",
    "posting/test_retry_cnt_and_rnr_retry.py",
    "posting/test_wr_id.py",
    "resources/test_ah.py",
)
"""Tests of each opcode and flag."""

CHECKS = (
    "posting/test_every_rule_refuses.py",
    "posting/test_opcodes_and_flags_by_qp_type.py",
    "posting/test_sges.py",
    "posting/test_inline.py",
    "posting/test_atomics.py",
    "posting/test_tso_header.py",
    "posting/test_wr_lists_and_bad_wr.py",
    "posting/test_queue_full.py",
    "posting/test_prepared.py",
    "resources/test_ah.py",
    "resources/test_qp_states.py",
    "resources/test_mw_type_2_bind_and_invalidate.py",
)
"""Tests of the checks of a post."""

READS = (
    "posting/test_wr_read_once.py",
    "posting/test_exceptions_of_caller_code.py",
    "posting/test_wr_classes.py",
    "posting/test_wr_id.py",
    "posting/test_concurrent_posts.py",
    "posting/test_memory_in_flight.py",
    "posting/test_sges.py",
    "posting/test_tso_header.py",
    "resources/test_resident_memory.py",
)
"""Tests of how work requests are read."""

IN_FLIGHT = (
    "posting/test_outstanding.py",
    "posting/test_outstanding_model.py",
    "posting/test_memory_in_flight.py",
    "posting/test_wr_lists_and_bad_wr.py",
    "posting/test_inline.py",
    "resources/test_mw_type_2_bind_and_invalidate.py",
    "resources/test_srq.py",
)
"""Tests of outstanding work requests, and of the memory that they keep."""

QPS = (
    "resources/test_qp_states.py",
    "resources/test_qp_modify.py",
    "resources/test_qp_connect.py",
    "resources/test_qp_create.py",
    "resources/test_gid.py",
    "resources/test_device.py",
)
"""Tests of queue pairs, without posts."""

MEMORY = (
    "resources/test_mr.py",
    "resources/test_mr_of_any_memory.py",
    "resources/test_mr_rereg.py",
    "resources/test_mw_type_2_bind_and_invalidate.py",
    "resources/test_mw_type_1_bind_mw.py",
    "resources/test_srq.py",
    "resources/test_pd.py",
)
"""Tests of regions, windows and SRQs."""

EVENTS = (
    "resources/test_comp_channel.py",
    "resources/test_async_events.py",
    "providers/software/test_soft_faults.py",
)

FRAMES = (
    "providers/soft0/test_soft_raw_packets_and_checksums.py",
    "providers/soft0/test_soft_tso.py",
)

RESPONDER = (
    "providers/software/test_soft_qp.py",
    "providers/software/test_soft_wc_fields.py",
    "providers/software/test_soft_async_events.py",
    "providers/soft0/test_soft_responder.py",
    "providers/soft0/test_soft_limits.py",
    *POSTS,
    "posting/test_opcodes_and_flags_by_qp_type.py",
    "posting/test_memory_in_flight.py",
    *MEMORY,
    "resources/test_xrc.py",
    *EVENTS,
    "resources/test_ud_grh_and_qkey.py",
    "resources/test_cq_poll_and_wait.py",
    *QPS,
    "providers/soft0/test_soft_tag_rendezvous.py",
    "providers/soft0/test_soft_tag_matching.py",
    *FRAMES,
    "providers/soft0/test_soft_retry_cnt_and_rnr_retry.py",
)
"""Tests of both halves of a responder."""

POLLERS = (
    "resources/test_cq_poll_and_wait.py",
    "resources/test_poll_into.py",
    "resources/test_cq_wait_range_and_cancel.py",
    "resources/test_cq_wait_threads.py",
    "resources/test_cq_create_and_close.py",
    "resources/test_cq_interrupts.py",
    "resources/test_cq_poll_failures.py",
    "resources/test_wc_fields.py",
    "resources/test_mw_type_2_bind_and_invalidate.py",
    "posting/test_concurrent_posts.py",
    "posting/test_wr_id.py",
    "posting/test_outstanding.py",
    "posting/test_memory_in_flight.py",
    "posting/test_retry_cnt_and_rnr_retry.py",
    "posting/test_queue_full.py",
    "resources/test_aio_completions.py",
    "resources/test_aio_events.py",
    "providers/soft0/test_soft_tag_matching.py",
    *EVENTS,
    "resources/test_resident_memory.py::"
    "test_polling_many_queue_pairs_leaves_resident_memory_where_it_was",
    "resources/test_close_at_exit_and_fork.py::test_interpreter_ends_quietly_while_a_thread_waits_for_completions",
    "providers/software/test_soft_interrupts_at_every_bytecode.py::"
    "test_ctrl_c_in_the_device_ends_the_wait_that_runs_the_device",
    "soundness/test_collector_shows_internals.py::"
    "test_completions_that_a_debugger_spoils_do_not_run_code_under_the_lock",
    "soundness/test_collector_shows_internals.py::test_poller_refuses_wrong_arguments",
    "soundness/test_collector_shows_internals.py::test_completion_whose_row_is_none_is_not_written",
    "soundness/test_recursion_limit.py::"
    "test_work_that_a_verb_lacks_stack_or_memory_for_is_done_later",
    "soundness/test_asyncio_interrupts.py::"
    "test_task_gets_the_completion_that_an_interrupted_thread_put_back",
    "soundness/test_fork.py::test_forked_child_that_polls_takes_no_completion_of_its_parent",
    "soundness/test_fork.py::test_child_forked_while_threads_wait_can_start_threads_and_exit",
    "soundness/test_fork.py::"
    "test_verb_interrupted_by_a_forking_handler_names_the_owner_in_the_child",
    "soundness/test_close_races.py::"
    "test_cq_closed_as_a_wait_starts_ends_the_wait_with_closed_error",
    "soundness/test_finalizers.py::"
    "test_handler_that_closes_the_resource_its_thread_waits_on_ends_the_wait",
)
"""Tests of polling and waiting."""

LIFE_OF_A_HANDLE = (
    "resources/test_close_order.py",
    "resources/test_close_during_verbs.py",
    "resources/test_constructors.py",
    "resources/test_garbage_collection.py",
    "resources/test_mr.py",
    "resources/test_mr_rereg.py",
    "resources/test_close_at_exit_and_fork.py",
    "posting/test_memory_in_flight.py",
    "resources/test_ah.py",
    "resources/test_mw_type_1_bind_mw.py",
    "providers/software/test_soft_handler_exceptions.py",
    "project/test_binding.py::test_only_the_main_interpreter_can_import_the_package",
    "project/test_binding.py::"
    "test_importing_the_package_again_after_its_modules_were_forgotten_is_refused_by_name",
    "resources/test_close_all.py",
    "resources/test_cq_poll_and_wait.py::test_polling_what_is_no_cq_is_refused",
    "resources/test_mr_of_any_memory.py::"
    "test_region_of_an_address_keeps_its_owner_until_it_is_closed",
    "soundness/test_mr_rereg_races.py::test_rereg_without_memory_moves_the_region_or_leaves_it",
    "soundness/test_exit.py",
    "soundness/test_fork.py",
    "soundness/test_mw_lifetimes.py",
    "soundness/test_finalizers.py::test_resource_dropped_near_the_recursion_limit_is_closed_later",
    "soundness/test_finalizers.py::"
    "test_dropping_all_resources_near_the_recursion_limit_does_not_hang",
    "soundness/test_finalizers.py::"
    "test_resources_dropped_near_the_recursion_limit_under_a_profiler_are_closed_later",
    "soundness/test_finalizers.py::test_handler_may_close_dependent_resources_in_any_order",
    "soundness/test_finalizers.py::"
    "test_library_error_raised_by_a_handler_within_a_finalizer_is_not_lost",
    "soundness/test_close_races.py::"
    "test_thread_that_keeps_polling_for_events_does_not_block_closing_the_channel",
    "soundness/test_close_races.py::"
    "test_closes_that_wait_for_each_other_in_a_ring_of_threads_all_return",
    "soundness/test_close_races.py::"
    "test_close_within_another_waits_for_a_thread_that_closes_the_same_resource",
    "soundness/test_close_races.py::"
    "test_child_created_by_a_handler_never_outlives_its_closing_parent",
)
"""Tests of creating, using, registering again and closing."""

DATA_VERBS = (
    "providers/software/test_soft_unchecked_posts.py",
    "providers/software/test_soft_qp.py",
    "providers/software/test_soft_wc_fields.py",
    "providers/software/test_soft_async_events.py",
    "providers/soft0/test_soft_responder.py",
    "providers/soft0/test_soft_requester.py",
    *POSTS,
    "providers/soft0/test_soft_limits.py",
    "providers/software/test_soft_cq_overrun.py",
    *QPS,
    "resources/test_srq.py",
    "resources/test_srq_modify.py",
    "resources/test_xrc.py",
    "resources/test_ud_grh_and_qkey.py",
    "resources/test_mw_type_1_bind_mw.py",
    "resources/test_mr_zero_based.py",
    "resources/test_cq_poll_and_wait.py",
    "resources/test_cq_timestamps.py",
    "providers/soft0/test_soft_tag_rendezvous.py",
    "providers/soft0/test_soft_tag_matching.py",
    "providers/soft0/test_soft_tag_ops.py",
    *FRAMES,
    *EVENTS,
    "resources/test_cq_interrupts.py::test_interrupts_at_any_moment_lose_no_completion",
    "providers/software/test_soft_interrupts_at_every_bytecode.py::"
    "test_handler_may_post_poll_and_close_in_the_middle_of_a_verb",
    "providers/software/test_soft_interrupts_at_every_bytecode.py::"
    "test_cq_armed_before_a_completion_is_visible_announces_it",
    "providers/software/test_soft_interrupts_at_every_bytecode.py::"
    "test_handler_of_another_signal_runs_to_its_end_while_an_exception_is_pending",
    "providers/software/test_soft_interrupts_at_every_bytecode.py::"
    "test_ctrl_c_in_the_device_ends_the_wait_that_runs_the_device",
    "providers/software/test_soft_interrupts_at_every_bytecode.py::"
    "test_interrupted_verb_happens_completely_or_not_at_all[poll_when_a_request_is_due-KeyboardInterrupt]",
    "resources/test_resident_memory.py",
    "providers/software/test_soft_load_and_out_of_memory.py::"
    "test_work_request_of_many_parts_is_refused_or_carried_out_whole_without_memory",
)
"""Tests of posts and polls on software devices."""

TRANSACTIONS = (
    "providers/software/test_soft_handler_exceptions.py",
    "providers/software/test_soft_interrupts_at_every_bytecode.py",
    "resources/test_cq_interrupts.py",
    "resources/test_cq_create_and_close.py",
    "resources/test_comp_channel.py",
    "providers/software/test_soft_load_and_out_of_memory.py::"
    "test_ctrl_c_inside_a_verb_is_raised_by_the_verb",
    "providers/software/test_soft_load_and_out_of_memory.py::"
    "test_send_without_memory_even_to_fail_is_carried_out_later",
    "providers/software/test_soft_load_and_out_of_memory.py::"
    "test_queue_pair_out_of_memory_does_not_block_another",
    "providers/software/test_soft_load_and_out_of_memory.py::test_retry_without_memory_is_made_later",
    "providers/software/test_soft_load_and_out_of_memory.py::"
    "test_exception_in_the_device_is_logged_and_fails_the_work_request",
)
"""Tests of the software devices' transactions."""

TARGETS: dict[str, tuple[str, ...]] = {
    "rdmapost.standard.opcodes": (
        *CHECKS,
        "posting/test_message_sizes.py",
        "standard/test_opcodes.py",
    ),
    "rdmapost.posting.rules": (
        *CHECKS,
        "posting/test_fence.py",
        "posting/test_solicited.py",
        "posting/test_signaled.py",
        "posting/test_imm_data.py",
        "posting/test_message_sizes.py",
        "posting/test_wr_classes.py",
        "providers/soft0/test_soft_tag_ops.py",
        "resources/test_qp_modify.py",
        "resources/test_mw_type_1_bind_mw.py",
    ),
    "rdmapost.providers.software.memory": (
        "providers/software/test_soft_mr_and_mw.py",
        "providers/software/test_soft_mr_of_any_memory.py",
        *MEMORY,
        *POSTS,
        "posting/test_opcodes_and_flags_by_qp_type.py",
        "posting/test_memory_in_flight.py",
        "resources/test_mr_zero_based.py",
        "resources/test_xrc.py",
    ),
    "rdmapost.providers.software.qp": (
        "providers/software/test_soft_qp.py",
        "providers/software/test_soft_wc_fields.py",
        "providers/software/test_soft_async_events.py",
        "providers/soft0/test_soft_limits.py",
        "providers/software/test_soft_cq_overrun.py",
        *QPS,
        *POSTS,
        "posting/test_opcodes_and_flags_by_qp_type.py",
        "posting/test_wr_lists_and_bad_wr.py",
        "posting/test_queue_full.py",
        "posting/test_wr_classes.py",
        "posting/test_outstanding.py",
        "posting/test_memory_in_flight.py",
        *MEMORY,
        "resources/test_xrc.py",
        "resources/test_ud_grh_and_qkey.py",
        "resources/test_cq_poll_and_wait.py",
        *EVENTS,
        "providers/soft0/test_soft_tag_rendezvous.py",
        "providers/soft0/test_soft_tag_matching.py",
        *FRAMES,
        "providers/soft0/test_soft_retry_cnt_and_rnr_retry.py",
    ),
    "rdmapost.providers.software.responder": RESPONDER,
    "rdmapost.providers.soft0.requester": (
        "providers/software/test_soft_qp.py",
        "providers/software/test_soft_wc_fields.py",
        "providers/software/test_soft_async_events.py",
        "providers/soft0/test_soft_limits.py",
        "providers/soft0/test_soft_requester.py",
        "providers/soft0/test_soft_responder.py",
        *POSTS,
        "posting/test_opcodes_and_flags_by_qp_type.py",
        "posting/test_wr_lists_and_bad_wr.py",
        "posting/test_queue_full.py",
        "posting/test_wr_classes.py",
        "posting/test_outstanding.py",
        "posting/test_memory_in_flight.py",
        *MEMORY,
        *QPS,
        "resources/test_ud_grh_and_qkey.py",
        "resources/test_cq_poll_and_wait.py",
        "resources/test_xrc.py",
        *EVENTS,
        "providers/soft0/test_soft_tag_rendezvous.py",
        *FRAMES,
        "providers/soft0/test_soft_retry_cnt_and_rnr_retry.py",
        "providers/software/test_soft_load_and_out_of_memory.py::"
        "test_exception_in_the_device_is_logged_and_fails_the_work_request",
    ),
    "rdmapost.providers.soft0.responder": RESPONDER,
    "rdmapost/_c/polling/wc.c": (
        "resources/test_wc_fields.py",
        "resources/test_cq_poll_failures.py",
        "project/test_errors.py",
        "providers/soft0/test_soft_tag_matching.py",
        "soundness/test_collector_shows_internals.py::"
        "test_refused_description_of_completions_changes_none",
        "soundness/test_collector_shows_internals.py::"
        "test_completions_that_a_debugger_spoils_do_not_run_code_under_the_lock",
    ),
    "rdmapost/_c/posting/rules.c": (
        *CHECKS,
        *READS,
        "posting/test_atomic_write_and_flush.py::test_post_without_send_ops_flags_is_refused",
        "soundness/test_fork.py::"
        "test_region_of_the_parent_is_closed_where_its_child_posts_to_a_queue_pair_of_its_own",
    ),
    "rdmapost/_c/posting/wr_types.c": ("posting/test_wr_structs.py", *READS, *CHECKS),
    "rdmapost/_c/posting/read_wr.c": (
        "posting/test_wr_structs.py",
        *READS,
        *CHECKS,
        "providers/soft0/test_soft_tag_ops.py",
        "posting/test_columns.py::test_region_of_columns_stays_open_until_the_last_row_is_done",
    ),
    "rdmapost/_c/posting/submit.c": ("posting/test_wr_lists_and_bad_wr.py", *CHECKS),
    "rdmapost/_c/posting/post.c": (
        *CHECKS,
        *IN_FLIGHT,
        "posting/test_wr_structs.py",
        *READS,
        "resources/test_mw_type_1_bind_mw.py",
        "resources/test_mr_rereg.py",
        "providers/soft0/test_soft_tag_ops.py",
        "posting/test_signaled.py",
        "soundness/test_mw_lifetimes.py",
        "soundness/test_recursion_limit.py::"
        "test_recursion_error_of_a_partly_posted_list_reports_how_many_were_posted",
        "soundness/test_recursion_limit.py::"
        "test_interrupted_error_of_a_partly_posted_list_reports_how_many_were_posted",
        "soundness/test_recursion_limit.py::test_interrupt_of_a_post_reports_how_many_were_posted",
        "soundness/test_recursion_limit.py::"
        "test_interrupt_of_an_error_that_cannot_say_what_was_posted_says_so",
        "providers/software/test_soft_handler_exceptions.py::"
        "test_post_error_that_a_handler_raises_keeps_what_it_says",
        "providers/software/test_soft_handler_exceptions.py::"
        "test_exception_of_a_handler_keeps_its_own_notes",
        "providers/software/test_soft_load_and_out_of_memory.py::"
        "test_ctrl_c_inside_a_verb_is_raised_by_the_verb",
    ),
    "rdmapost/_c/posting/prepared.c": (
        "posting/test_prepared.py",
        "posting/test_prepared_fields.py",
        "posting/test_wr_structs.py",
        *CHECKS,
        *IN_FLIGHT,
        *READS,
        "resources/test_mr_rereg.py::test_region_of_an_invalidated_window_is_registered_again",
        "resources/test_close_all.py::"
        "test_close_all_by_the_garbage_collector_closes_the_device_whatever_it_interrupts",
        "soundness/test_fork.py::test_use_in_a_forked_child_names_the_owner_and_the_remedy",
        "soundness/test_interrupts.py::"
        "test_handler_that_prepares_while_its_queue_pair_is_closed_leaves_no_list_open",
        "soundness/test_recursion_limit.py::"
        "test_posts_in_each_other_without_a_python_function_end_with_recursion_error",
    ),
    "rdmapost/_c/libibverbs/poll_cq.c": (
        "resources/test_cq_poll_failures.py",
        "project/test_binding.py::test_poll_of_no_entries_is_refused_by_the_shim",
        "providers/soft0/test_soft_tag_matching.py",
    ),
    "rdmapost/_c/posting/inflight.c": (
        *IN_FLIGHT,
        "posting/test_prepared.py",
        "posting/test_sges.py",
        "posting/test_columns.py",
        "providers/soft0/test_soft_tag_ops.py",
        "soundness/test_mw_lifetimes.py",
        "resources/test_mr_rereg.py",
        "resources/test_cq_interrupts.py::test_poll_without_memory_loses_no_completion",
        "soundness/test_collector_shows_internals.py::"
        "test_table_of_queues_with_anything_in_it_finds_no_other_queue",
        "resources/test_constructors.py::"
        "test_constructor_without_memory_leaves_nothing_that_keeps_its_parents_open",
        "resources/test_resident_memory.py::"
        "test_opening_and_closing_leaves_resident_memory_where_it_was",
    ),
    "rdmapost/_c/posting/inline_buffer.c": (
        *READS,
        *CHECKS,
        "resources/test_garbage_collection.py::"
        "test_the_collector_may_take_a_memoryview_and_an_sge_over_it",
    ),
    "rdmapost/_c/posting/tag_handle.c": (
        "providers/soft0/test_soft_tag_ops.py",
        "providers/soft0/test_soft_tag_matching.py",
    ),
    "rdmapost/_c/posting/build_wr.c": ("posting/test_atomic_write_and_flush.py",),
    "rdmapost/_c/roce/icrc.c": ("providers/roce/test_roce_packets.py",),
    "rdmapost/_c/roce/packets.c": (
        "providers/roce/test_roce_packets.py",
        "providers/roce/test_roce_responder.py",
        "providers/roce/test_roce_requester.py",
        "providers/roce/test_roce_device.py",
    ),
    "rdmapost/_c/memory/dlpack.c": ("resources/test_mr_of_any_memory.py",),
    "rdmapost/_c/software/mapped_memory.c": ("providers/software/test_soft_mr_of_any_memory.py",),
    "rdmapost/_c/posting/sge.c": (
        *MEMORY,
        "posting/test_sges.py",
        "posting/test_inline.py",
        "posting/test_memory_in_flight.py",
        "resources/test_ah.py",
    ),
    "rdmapost/_c/posting/columns.c": (
        "posting/test_columns.py",
        "posting/test_atomic_write_and_flush.py",
        "resources/test_mr_rereg.py",
        "resources/test_mw_type_2_bind_and_invalidate.py",
    ),
    "rdmapost/_c/posting/wr_init.c": (
        "posting/test_wr_classes.py",
        "project/test_argument_types.py",
        "posting/test_wr_structs.py",
    ),
    "rdmapost/_c/attribute_offsets.c": (
        "posting/test_wr_classes.py",
        "posting/test_wr_structs.py",
        "posting/test_sges.py",
    ),
    "rdmapost/_c/software/fast_path.c": (
        "providers/soft0/test_soft_fast_path.py",
        "soundness/test_collector_shows_internals.py::"
        "test_device_queues_with_anything_in_them_do_not_end_the_process",
        "soundness/test_collector_shows_internals.py::"
        "test_private_functions_of_the_software_devices_check_their_arguments",
    ),
    "rdmapost/_c/software/queue_types.c": DATA_VERBS,
    "rdmapost/_c/software/data_verbs.c": DATA_VERBS,
    "rdmapost/_c/software/faults.c": (
        "providers/software/test_soft_faults.py",
        "providers/soft0/test_soft_limits.py",
        "providers/software/test_soft_cq_overrun.py",
        "posting/test_error_completions.py",
        "posting/test_retry_cnt_and_rnr_retry.py",
        *IN_FLIGHT,
        "posting/test_prepared.py",
        "providers/software/test_soft_load_and_out_of_memory.py",
    ),
    "rdmapost/_c/software/device.c": (
        "project/test_binding.py::test_soft_device_takes_its_parts_once_and_all_of_them",
        *TRANSACTIONS,
    ),
    "rdmapost/_c/software/transaction.c": TRANSACTIONS,
    "rdmapost/_c/software/journal.c": (
        "providers/software/test_soft_qp.py",
        "providers/software/test_soft_wc_fields.py",
        "providers/software/test_soft_async_events.py",
        "providers/software/test_soft_faults.py",
        "providers/soft0/test_soft_limits.py",
        "providers/software/test_soft_cq_overrun.py",
        "providers/software/test_soft_mr_and_mw.py",
        *MEMORY,
        *EVENTS,
        "providers/software/test_soft_interrupts_at_every_bytecode.py",
    ),
    "rdmapost/_c/handles/thread.c": (
        "posting/test_concurrent_posts.py",
        "resources/test_close_at_exit_and_fork.py",
        "soundness/test_fork.py",
        "soundness/test_recursion_limit.py::"
        "test_posts_in_each_other_without_a_python_function_end_with_recursion_error",
    ),
    "rdmapost/_c/handles/exceptions.c": (
        "resources/test_close_order.py",
        "providers/software/test_soft_handler_exceptions.py",
        "posting/test_exceptions_of_caller_code.py",
        "resources/test_cq_interrupts.py",
        "resources/test_cq_wait_threads.py::"
        "test_wait_that_leaves_completions_to_an_earlier_wait_says_if_it_gets_no_descriptor",
        "soundness/test_finalizers.py",
    ),
    "rdmapost/_c/handles/queue_lock.c": (
        "posting/test_concurrent_posts.py",
        *READS,
        "resources/test_cq_interrupts.py",
        "resources/test_cq_create_and_close.py",
        "resources/test_comp_channel.py",
    ),
    "rdmapost/_c/polling/comp_channel.c": (
        "resources/test_comp_channel.py",
        "resources/test_cq_create_and_close.py",
        "resources/test_cq_interrupts.py",
        "resources/test_cq_poll_and_wait.py",
        *EVENTS,
    ),
    "rdmapost/_c/polling/cq.c": POLLERS,
    "rdmapost/_c/polling/waiters.c": POLLERS,
    "rdmapost/_c/polling/rows.c": ("resources/test_poll_into.py",),
    **dict.fromkeys(
        [
            f"rdmapost/_c/handles/{name}.c"
            for name in (
                "handle_type",
                "handle",
                "create",
                "close",
                "reregister",
                "windows",
                "finalizer",
            )
        ],
        LIFE_OF_A_HANDLE,
    ),
}
"""The modules, and the test files or tests that must catch their mutants, fastest first."""


# ---- mutants --------------------------------------------------------------------

_OPERATORS: dict[type, tuple[type, ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Mod: (ast.Add,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitOr,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
}
_DROPPED = (
    ast.Expr,
    ast.Assign,
    ast.AugAssign,
    ast.Raise,
    ast.Return,
    ast.Continue,
    ast.Break,
    ast.Delete,
)


@dataclass(frozen=True)
class Mutant:
    """One change to a module.

    Attributes:
        module: the module's name, or the path of a C file.
        name: the change and its place, as written in mutants.txt.
        line: the line changed.
        changed: the changed syntax tree of the module, or source of the C file.
        number: its position among the changes to a C file, from 1.
    """

    module: str
    name: str
    line: int
    changed: ast.Module | str
    number: int = 0


def mutants_of(module: str) -> list[Mutant]:
    """Make all mutants of a module."""
    found = list(_in_c(module) if "/" in module else _in_python(module))
    seen: Counter[str] = Counter()
    for index, mutant in enumerate(found):
        seen[mutant.name] += 1
        if seen[mutant.name] > 1:
            name = f"{mutant.name}  ({seen[mutant.name]})"
            found[index] = dataclasses.replace(mutant, name=name)
    return found


def _in_c(path: str) -> Iterator[Mutant]:
    source = (ROOT / path).read_text()
    for number, edit in enumerate(mutants_c.File(source).edits(), 1):
        changed = source[: edit.start] + edit.text + source[edit.end :]
        line = source.count("\n", 0, edit.start) + 1
        yield Mutant(path, f"{path}: {edit.where or 'file'}: {edit.said}", line, changed, number)


def _in_python(module: str) -> Iterator[Mutant]:
    # Not by import: this process's children would share the imported module.
    source = ast.parse((ROOT / module.replace(".", "/")).with_suffix(".py").read_text())
    for path, node, where in _walk(source):
        for change, said in _changes(node):
            tree = copy.deepcopy(source)
            target: Any = tree
            parent, step = tree, path[0] if path else ("body", 0)
            for step in path:
                parent = target
                target = _at(target, step)
            change(target, parent, step)
            name = f"{module}: {where or 'module'}: {said}"
            yield Mutant(module, name, node.lineno, ast.fix_missing_locations(tree))


def _at(node: Any, step: tuple[str, int | None]) -> Any:
    field, index = step
    value = getattr(node, field)
    return value if index is None else value[index]


def _walk(
    node: ast.AST, path: tuple[Any, ...] = (), where: str = ""
) -> Iterator[tuple[tuple[Any, ...], Any, str]]:
    """Yield every node that may be changed: the path to it, the node, and its function."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        where = f"{where}.{node.name}" if where else node.name
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return
    if hasattr(node, "lineno"):
        yield path, node, where
    for field, value in ast.iter_fields(node):
        if field in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        if isinstance(value, ast.AST):
            yield from _walk(value, (*path, (field, None)), where)
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if isinstance(item, ast.AST):
                    yield from _walk(item, (*path, (field, index)), where)


def _changes(node: Any) -> Iterator[tuple[Any, str]]:
    """Yield each possible change to a node, with its description."""
    text = ast.unparse(node)
    short = text if len(text) < 90 else text[:87] + "..."

    def put(made: Any) -> Any:
        def change(target: Any, parent: Any, step: tuple[str, int | None]) -> None:
            field, index = step
            if index is None:
                setattr(parent, field, made)
            else:
                getattr(parent, field)[index] = made

        return change

    def renewed(field: str, value: Any) -> Any:
        made = copy.copy(node)
        setattr(made, field, value)
        return made

    def changed(made: Any) -> tuple[Any, str]:
        after = ast.unparse(ast.fix_missing_locations(made))
        return put(made), f"{short} -> {after if len(after) < 90 else after[:87] + '...'}"

    if isinstance(node, ast.Compare):
        for index, op in enumerate(node.ops):
            for other in _OPERATORS.get(type(op), ()):
                yield changed(renewed("ops", [*node.ops[:index], other(), *node.ops[index + 1 :]]))
    elif isinstance(node, ast.BoolOp | ast.BinOp):
        for other in _OPERATORS.get(type(node.op), ()):
            yield changed(renewed("op", other()))
        if isinstance(node, ast.BoolOp):
            for index in range(len(node.values)):
                rest = [*node.values[:index], *node.values[index + 1 :]]
                yield changed(rest[0] if len(rest) == 1 else renewed("values", rest))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert | ast.USub):
        yield changed(node.operand)
    elif isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield changed(ast.Constant(not node.value))
        elif isinstance(node.value, int):
            yield changed(ast.Constant(node.value + 1))
    elif isinstance(node, ast.IfExp):
        yield changed(renewed("test", ast.UnaryOp(ast.Not(), node.test)))
    elif isinstance(node, ast.If | ast.While):
        if not isinstance(node.test, ast.Compare | ast.BoolOp | ast.UnaryOp | ast.Constant):
            head = ast.unparse(node.test)
            word = type(node).__name__.lower()
            made = renewed("test", ast.UnaryOp(ast.Not(), node.test))
            yield put(made), f"{word} {head} -> {word} not {head}"
    elif isinstance(node, ast.Set | ast.Dict):
        size = len(node.elts if isinstance(node, ast.Set) else node.keys)
        for index in range(size):
            made = copy.copy(node)
            for field in ("elts",) if isinstance(node, ast.Set) else ("keys", "values"):
                items = getattr(node, field)
                setattr(made, field, [*items[:index], *items[index + 1 :]])
            if isinstance(node, ast.Set) and size == 1:
                continue
            gone = node.elts[index] if isinstance(node, ast.Set) else node.keys[index]
            yield put(made), f"{short} without {ast.unparse(gone) if gone else '**'}"
    elif isinstance(node, _DROPPED):
        string = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        # Another test checks what a module exports; __slots__ only save memory.
        said = isinstance(node, ast.Assign) and ast.unparse(node.targets[0])
        exports = said in ("__all__", "__slots__")
        nothing = isinstance(node, ast.Return) and ast.unparse(node) in ("return", "return None")
        if not (string or exports or nothing):
            yield put(ast.Pass()), f"{short} -> pass"


# ---- running the tests ----------------------------------------------------------


class Instead(importlib.abc.MetaPathFinder):
    """An import finder that returns the mutant instead of its module."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        assert spec is not None
        assert spec.origin is not None
        spec.loader = Loader(name, spec.origin, self.mutant)
        return spec


class Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, mutant: Mutant) -> None:
        super().__init__(name, path)
        self.mutant = mutant

    def get_code(self, fullname: str) -> Any:
        return compile(self.mutant.changed, self.path, "exec", dont_inherit=True)


class Python:
    """Makes children of this process import mutants of a Python module."""

    def put(self, mutant: Mutant | None, place: int) -> None:
        """Make this child process import a mutant, or with None the original."""
        if mutant is not None:
            sys.meta_path.insert(0, Instead(mutant))


class InC:
    """Makes children of this process, and their children, import modules with a changed C file.

    Args:
        work: an empty directory.
        places: the number of children at a time.
    """

    def __init__(self, work: pathlib.Path, places: int) -> None:
        (work / "build").mkdir()
        self.build = mutants_c.Build(work / "build")
        self.places = [work / str(place) for place in range(places)]
        self.modules = [self.build.package(place) for place in self.places]

    def put_all(self, path: str, file: mutants_c.Selectable) -> tuple[pathlib.Path, set[int]]:
        """Build a module with all mutants of a file, and make this child process import it."""
        wrong = self.build.link_selectable(mutants_c.name_of(path), file, self.modules[0])
        self._enter(0)
        return self.modules[0], wrong

    def put(self, mutant: Mutant | None, place: int) -> None:
        """Build a mutant, or with None the original, and make this child process import it."""
        module = self.modules[place]
        if mutant is None:
            self.build.link("", None, module)
        else:
            assert isinstance(mutant.changed, str)
            try:
                self.build.link(mutants_c.name_of(mutant.module), mutant.changed, module)
            except mutants_c.DoesNotCompile:
                os._exit(NO_MUTANT)
            except mutants_c.SameObject:
                os._exit(THE_SAME)
        self._enter(place)

    def _enter(self, place: int) -> None:
        package = str(self.places[place])
        # Put it before the checkout, which another process would search first.
        os.chdir(package)
        sys.path.insert(0, package)
        os.environ["PYTHONPATH"] = package
        os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix or ""


NO_MUTANT, THE_SAME = 100, 101
"""Exit codes of a child; pytest's are less."""


@dataclass(frozen=True)
class Stage:
    """Some of a module's tests, which run in one process.

    Attributes:
        tests: their files.
        limits: their limits in seconds: CPU time, and wall time.
    """

    tests: tuple[str, ...]
    limits: tuple[float, float] = (300, 600)


ADDRESS_SPACE = 8 << 30
"""Limit on the memory that each process of a child may map, in bytes."""

_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.exec", "os.system")
"""Events of sys.audit() that start another process, which may call any function."""

_OUT_OF_TIME = (signal.SIGPROF, signal.SIGALRM, signal.SIGKILL)


def be_mutant() -> None:
    """Contain this process, a forked child, so that a mutant can do no harm."""
    # A new process group, so that the processes it starts are killed with it.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A mutant may allocate memory endlessly, or crash.
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Keep the child's garbage collector from traversing all mutants' trees each time.
    gc.freeze()


def limit(seconds: tuple[float, float]) -> None:
    """Kill this process when it exceeds its CPU time or wall time."""
    # By a signal, which also ends a hang in C.  An endless loop uses CPU time and
    # hits that limit soon, even on a busy machine.
    timers = (signal.ITIMER_PROF, signal.ITIMER_REAL)
    for timer, signum, max_seconds in zip(timers, _OUT_OF_TIME, seconds, strict=False):
        signal.signal(signum, signal.SIG_DFL)
        signal.setitimer(timer, max_seconds)


def be_quiet() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)


def arguments(tests: tuple[str, ...]) -> list[str]:
    """Return pytest's arguments."""
    # Only whether the tests fail matters: do not explain failures or shrink examples.
    return [
        "-x",
        "-q",
        "--tb=no",
        "--assert=plain",
        *(f"-pno:{name}" for name in ("cacheprovider", "doctest", "junitxml")),
        # The parent ends a test that hangs.
        "-ofaulthandler_timeout=0",
        "-ofaulthandler_exit_on_timeout=false",
        "--hypothesis-seed=0",
        f"--hypothesis-profile={PROFILE}",
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-m",
        "not rdma and not two_hosts",
        *(str(TESTS / name) for name in dict.fromkeys(tests)),
    ]


def start(put: Callable[[], None], stage: Stage) -> int:
    """Run the tests in a child that first installs a mutant; return its process ID."""
    pid = os.fork()
    if pid:
        return pid
    be_mutant()
    put()
    limit(stage.limits)
    be_quiet()
    code = 1
    try:
        import pytest

        code = pytest.main(arguments(stage.tests))
    finally:
        # Discard all output: a mutant may complain when it is torn down.
        os._exit(int(code))


def ended(pid: int) -> None:
    """Kill the processes that a finished child left behind."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def stages_of(module: str, language: Python | InC) -> tuple[Stage, ...]:
    """Run the unmodified module's tests, and measure how long they take."""
    tests = TARGETS[module]
    found: list[Stage] = []
    # The first file catches most mutants, so the others need not be loaded.
    for names in filter(None, (tests[:1], tests[1:])):
        begun = time.monotonic()
        pid, status, used = os.wait4(start(lambda: language.put(None, 0), Stage(names)), 0)
        ended(pid)
        if status:
            raise SystemExit(f"the tests of {module} fail as it is: {', '.join(names)}")
        limits = 3 * (used.ru_utime + used.ru_stime) + 2, 10 * (time.monotonic() - begun) + 60
        found.append(Stage(names, limits))
    return tuple(found)


@dataclass
class Tried:
    """The results for a module's mutants.

    Attributes:
        survivors: those that no test caught.
        count: how many were tested.
        late: how many of these timed out.
        same: how many others compile to identical code.
    """

    survivors: list[Mutant]
    count: int
    late: int = 0
    same: int = 0


class Selecting:
    """A pytest plugin that forks a child for each mutant, after the tests are collected.

    Args:
        library: the module that contains all mutants.
        numbers: the mutants' numbers, each with the index of its function.
        jobs: the number of children at a time.
        report: called with the number of each mutant and its result: "noticed", "late",
            "survived" or, if no test calls the function, "not called".
    """

    KILLERS = 30
    """How many tests that caught other mutants run first."""

    def __init__(
        self,
        library: pathlib.Path,
        numbers: dict[int, int],
        jobs: int,
        report: Callable[[int, str], None],
    ) -> None:
        self.library, self.numbers, self.jobs, self.report = library, numbers, jobs, report

    def pytest_runtestloop(self, session: Any) -> bool:
        lib = ctypes.CDLL(str(self.library))
        self.session = session
        if tap := sys.modules.get("tap"):
            # Compiled once for all children.
            tap._compiled()
        self.selected = ctypes.c_int.in_dll(lib, "mutant_selected")
        self.reached = (ctypes.c_char * (max(self.numbers.values()) + 1)).in_dll(
            lib, "mutant_reached"
        )
        self.calls: list[set[int] | None] = [None] * len(session.items)
        self.takes = [0.0] * len(session.items)
        self._measure()
        # A child writes here which test failed.
        self.noticed = mmap.mmap(-1, 4 * (max(self.numbers) + 1))
        # A child writes its deadline here: a test may have changed the timers that limit() set.
        self.ends = mmap.mmap(-1, 8 * (max(self.numbers) + 1))
        killers: list[int] = []
        waiting, running = [*self.numbers][::-1], dict[int, int]()
        try:
            while waiting or running:
                while waiting and len(running) < self.jobs:
                    number = waiting.pop()
                    order = self._order(self.numbers[number], killers)
                    if not order:
                        self.report(number, "not called")
                        continue
                    running[self._fork(functools.partial(self._try, number, order))] = number
                if not running:
                    break
                pid, status = self._wait(running)
                ended(pid)
                number = running.pop(pid)
                code = os.waitstatus_to_exitcode(status)
                test = int.from_bytes(self.noticed[4 * number : 4 * number + 4], "little") - 1
                if code and test >= 0:
                    killers = [test, *(other for other in killers if other != test)][: self.KILLERS]
                self.report(
                    number, "late" if -code in _OUT_OF_TIME else "noticed" if code else "survived"
                )
        finally:
            for pid in running:
                ended(pid)
        return True

    def _wait(self, running: dict[int, int]) -> tuple[int, int]:
        """Wait for a child; return its process ID and its status."""
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid:
                return pid, status
            for child, number in running.items():
                (end,) = struct.unpack_from("d", self.ends, 8 * number)
                if 0 < end < time.monotonic():
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.005)

    def _order(self, function: int, killers: list[int]) -> list[int]:
        """Return the tests that may call a function, those likely to fail first."""
        rank = {test: place for place, test in enumerate(killers)}
        here = [test for test, calls in enumerate(self.calls) if calls and function in calls]
        if not here:
            return []
        # It is unknown which functions another process calls.
        there = [test for test, calls in enumerate(self.calls) if calls is None]
        return [*sorted(here, key=lambda test: rank.get(test, len(rank) + test)), *there]

    def _fork(self, run: Callable[[], None]) -> int:
        pid = os.fork()
        if not pid:
            be_mutant()
            try:
                run()
            finally:
                os._exit(1)
        return pid

    def _run(self, test: int, following: int | None) -> bool:
        """Run a test; return whether it passed."""
        items = self.session.items
        after = None if following is None else items[following]
        items[test].config.hook.pytest_runtest_protocol(item=items[test], nextitem=after)
        return not self.session.testsfailed

    def _measure(self) -> None:
        """Record each test's duration and the functions it calls, in a child, without a mutant."""
        reading, writing = os.pipe()

        def run() -> None:
            said: list[Any] = []
            started: list[str] = []
            sys.addaudithook(lambda event, _: started.append(event) if event in _STARTS else None)
            for test, item in enumerate(self.session.items):
                ctypes.memset(self.reached, 0, len(self.reached))
                begun = time.monotonic()
                # Every test in a file depends on what its module-scoped fixtures call.
                if not self._run(test, None):
                    said = [item.nodeid]
                    break
                calls = [place for place, one in enumerate(self.reached.raw) if one]
                said.append((time.monotonic() - begun, None if started else calls))
                started.clear()
            with os.fdopen(writing, "w") as file:
                json.dump(said, file)
            os._exit(0)

        pid = self._fork(run)
        os.close(writing)
        with os.fdopen(reading) as file:
            text = file.read()
        os.waitpid(pid, 0)
        ended(pid)
        said = json.loads(text or '["(it crashed)"]')
        if said and isinstance(said[-1], str):
            raise RuntimeError(f"a test fails as it is: {said[-1]}")
        for test, (seconds, calls) in enumerate(said):
            self.takes[test] = seconds
            self.calls[test] = None if calls is None else set(calls)

    def _try(self, number: int, order: list[int]) -> None:
        self.selected.value = number
        os.environ[mutants_c.VARIABLE] = str(number)
        for place, test in enumerate(order):
            self.noticed[4 * number : 4 * number + 4] = (test + 1).to_bytes(4, "little")
            limits = 5 * self.takes[test] + 3, 20 * self.takes[test] + 15
            limit(limits)
            struct.pack_into("d", self.ends, 8 * number, time.monotonic() + limits[1] + 1)
            following = order[place + 1] if place + 1 < len(order) else None
            if not self._run(test, following):
                os._exit(1)
        os._exit(0)


def noticed_in_forks(
    module: str, language: InC, mutants: list[Mutant], options: argparse.Namespace
) -> dict[Mutant, str]:
    """Test a C file's mutants that are all in one module.

    Returns:
        The result of each: "noticed", "late", "survived", or "" if it does not compile.  Mutants
        of code that no test calls are left out: the code may run when the module is imported.
    """
    source = (ROOT / module).read_text()
    file = mutants_c.Selectable(source, [*mutants_c.File(source).edits()])
    numbered = {mutant.number: mutant for mutant in mutants}
    found: dict[Mutant, str] = {}
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        code = 1
        try:
            library, wrong = language.put_all(module, file)
            report = os.fdopen(writing, "w", buffering=1)
            report.writelines(f"{number}:\n" for number in wrong & numbered.keys())
            numbers = {
                number: place
                for number, place in file.function_of.items()
                if number in numbered and number not in wrong
            }
            if numbers:
                import pytest

                said = os.dup(2)
                be_quiet()
                loop = Selecting(
                    library,
                    numbers,
                    options.jobs,
                    lambda number, came: print(f"{number}:{came}", file=report),
                )
                try:
                    # No capturing: its files would be shared by all children.
                    code = pytest.main([*arguments(TARGETS[module]), "-s"], plugins=[loop])
                finally:
                    os.dup2(said, 2)
            else:
                code = 0
        finally:
            os._exit(int(code))
    os.close(writing)
    try:
        with os.fdopen(reading) as lines:
            for line in lines:
                number, _, came = line.strip().partition(":")
                mutant = numbered[int(number)]
                if came != "not called":
                    found[mutant] = came
                if came == "survived":
                    print(
                        f"  not noticed so far: line {mutant.line}: {mutant.name}",
                        file=sys.stderr,
                        flush=True,
                    )
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    if status:
        raise SystemExit(f"the tests of {module} fail as it is")
    return found


def built_alone(language: InC, mutants: list[Mutant], tried: Tried) -> None:
    """Find the survivors that compile to identical code."""
    for mutant in mutants:
        assert isinstance(mutant.changed, str)
        try:
            language.build.link(
                mutants_c.name_of(mutant.module), mutant.changed, language.modules[0]
            )
            tried.survivors.append(mutant)
        except mutants_c.DoesNotCompile:
            tried.count -= 1
        except mutants_c.SameObject:
            tried.count -= 1
            tried.same += 1


def survivors_of(module: str, language: Python | InC, options: argparse.Namespace) -> Tried:
    """Run the tests on a module's mutants."""
    waiting = [mutant for mutant in mutants_of(module) if options.only in mutant.name]
    if options.again:
        listed = {
            line.strip().partition(": ")[2] for line in options.again.read_text().splitlines()
        }
        waiting = [mutant for mutant in waiting if mutant.name in listed]
    part, parts = map(int, options.part.split("/"))
    waiting = waiting[part - 1 :: parts]
    tried = Tried([], len(waiting))
    if isinstance(language, InC):
        if options.quick:
            equivalent = known()
            waiting = [mutant for mutant in waiting if mutant.name not in equivalent]
            tried.count = len(waiting)
        found = noticed_in_forks(module, language, waiting, options)
        tried.count -= sum(not came for came in found.values())
        tried.late += sum(came == "late" for came in found.values())
        survived = [mutant for mutant in waiting if found.get(mutant) == "survived"]
        waiting = [mutant for mutant in waiting if mutant not in found]
        if options.quick:
            built_alone(language, survived, tried)
        else:
            waiting += survived
    if not waiting:
        return tried
    stages = stages_of(module, language)
    jobs = [(mutant, 0) for mutant in waiting]
    running: dict[int, tuple[Mutant, int, int]] = {}
    free = [*range(options.jobs)]
    while jobs or running:
        try:
            while jobs and free:
                mutant, stage = jobs.pop()
                place = free.pop()
                pid = start(functools.partial(language.put, mutant, place), stages[stage])
                running[pid] = mutant, stage, place
            pid, status = os.wait()
        except KeyboardInterrupt:
            tried.count -= len(jobs) + len(running)
            break
        ended(pid)
        mutant, stage, place = running.pop(pid)
        free.append(place)
        code = os.waitstatus_to_exitcode(status)
        if code in (NO_MUTANT, THE_SAME):
            tried.count -= 1
            tried.same += code == THE_SAME
        elif code == 0 and stage + 1 < len(stages):
            jobs.append((mutant, stage + 1))
        elif code == 0:
            tried.survivors.append(mutant)
            # Print at once, in case the run is interrupted.
            print(f"  not noticed: line {mutant.line}: {mutant.name}", file=sys.stderr, flush=True)
        tried.late += -code in _OUT_OF_TIME
    for pid in running:
        ended(pid)
    tried.survivors.sort(key=lambda mutant: mutant.line)
    return tried


def known() -> dict[str, str]:
    """Return the mutants listed as equivalent, with the reason."""
    found: dict[str, str] = {}
    reason = ""
    if EQUIVALENT.exists():
        for line in EQUIVALENT.read_text().splitlines():
            if line.startswith("# "):
                reason = line[2:]
            elif line.strip():
                found[line.strip()] = reason
    return found


def tried(module: str, options: argparse.Namespace, equivalent: dict[str, str]) -> bool:
    """Test a module's mutants and print the results; return whether any unlisted one survived."""
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as work:
        language = InC(pathlib.Path(work), options.jobs) if "/" in module else Python()
        done = survivors_of(module, language, options)
    survivors = done.survivors
    new = [mutant for mutant in survivors if mutant.name not in equivalent]
    print(
        f"{module}: {done.count} mutants, {done.count - len(survivors)} noticed "
        f"({done.late} by a timeout), {len(survivors) - len(new)} known to mean the same "
        f"(and {done.same} to the compiler), {len(new)} survived; "
        f"{time.monotonic() - begun:.0f} s",
        flush=True,
    )
    for mutant in new:
        print(f"  line {mutant.line}: {mutant.name}", flush=True)
    names = {mutant.name for mutant in survivors}
    partial = options.only or options.part != "1/1" or options.quick or options.again
    stale = [
        name
        for name in equivalent
        if name.startswith(f"{module}: ") and not partial and name not in names
    ]
    for name in stale:
        print(f"  listed in {EQUIVALENT.name}, and noticed or gone: {name}", flush=True)
    return bool(new or stale)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "modules",
        nargs="*",
        default=[*TARGETS],
        metavar="MODULE",
        help="a module, or a C file by its path; default: all",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="of C files: no second look, and none at those in mutants.txt",
    )
    parser.add_argument(
        "--again",
        type=pathlib.Path,
        metavar="FILE",
        help="those that survived an earlier run, whose output this is",
    )
    parser.add_argument("--part", default="1/1", metavar="K/N", help="one of N parts, from 1")
    options = parser.parse_args()
    for module in options.modules:
        if module not in TARGETS:
            parser.error(f"{module} is not in TARGETS, with the tests that are to notice")
    # Kill the children when this process dies.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Import here what each child would otherwise import again.
    import hypothesis
    import pytest  # noqa: F401

    hypothesis.settings.register_profile(
        PROFILE,
        database=None,
        deadline=None,
        max_examples=EXAMPLES,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
        suppress_health_check=list(hypothesis.HealthCheck),
    )

    os.environ["RDMAPOST_MOMENTS"] = MOMENTS
    sys.path.insert(0, str(TESTS))
    equivalent = known()
    failed = False
    # Compile once for all children, and not next to the sources.
    with tempfile.TemporaryDirectory() as compiled:
        sys.pycache_prefix, sys.dont_write_bytecode = compiled, False
        for module in options.modules:
            failed = tried(module, options, equivalent) or failed
    return failed


if __name__ == "__main__":
    sys.exit(main())
