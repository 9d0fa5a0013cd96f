//! The `extern "C"` functions of the headers in `cpp/`, where each is described.

use std::ffi::{c_char, c_int, c_void};
use torch_sys::C_tensor;

use super::{Fingerprint, Modes, OptimizerOptions, TapeInfo};

/// A C++ type that Rust only points to.
macro_rules! opaque {
    ($($name:ident),*) => {$(
        #[repr(C)]
        pub(super) struct $name {
            _private: [u8; 0],
        }
    )*};
}

opaque!(CGenerator, CGraph, CGroup, COptim, CReplayed, CSaved, CStorageSet, CStore, CTape, CWatch, CWeak, CWorks);

#[repr(C)]
pub(super) struct NodeCallbacks {
    pub(super) run: extern "C" fn(
        replayer: *const c_void,
        node_state: *const c_void,
        grads: *const *const C_tensor,
        n_grads: usize,
        replayed: *mut CReplayed,
    ) -> c_int,
    pub(super) finished: extern "C" fn(replayer: *const c_void, node_state: *const c_void, seconds: f64),
    pub(super) release: extern "C" fn(node_state: *const c_void),
    pub(super) drop: extern "C" fn(node_state: *const c_void),
}

unsafe extern "C" {
    pub(super) fn replay_last_error(full: c_int) -> *const c_char;

    pub(super) fn replay_attach(
        rollout: u64,
        block: *const c_char,
        state: *const c_void,
        callbacks: *const NodeCallbacks,
        inputs: *const *const C_tensor,
        n_inputs: usize,
        outputs: *const *const C_tensor,
        n_outputs: usize,
    ) -> c_int;
    pub(super) fn replay_barrier(
        inputs: *const *const C_tensor,
        n_inputs: usize,
        outputs: *const *const C_tensor,
        n_outputs: usize,
    ) -> c_int;
    pub(super) fn replay_refuse_grad(leaf: *const C_tensor, why: *const c_char) -> c_int;
    pub(super) fn replay_saved_on_host(saved: *const CSaved) -> c_int;
    pub(super) fn replay_backward(
        rollout: u64,
        replayer: *const c_void,
        loss: *const C_tensor,
        leaves: *const *const C_tensor,
        n_leaves: usize,
        kind: c_int,
        copied: *mut u64,
    ) -> c_int;
    pub(super) fn replay_push_root(replayed: *mut CReplayed, root: *const C_tensor, grad: *const C_tensor) -> c_int;
    pub(super) fn replay_push_leaf(replayed: *mut CReplayed, index: usize, leaf: *const C_tensor) -> c_int;
    pub(super) fn replay_push_graph(
        replayed: *mut CReplayed,
        graph: *mut CGraph,
        grads: *const *const C_tensor,
        n: usize,
    ) -> c_int;
    pub(super) fn replay_sequence() -> u64;
    pub(super) fn replay_leaves(
        roots: *const *const C_tensor,
        n: usize,
        since: u64,
        visit: extern "C" fn(context: *mut c_void, identity: usize, variable: *const C_tensor),
        context: *mut c_void,
        cuda_index: *mut c_int,
        spans: *const u64,
        n_spans: usize,
        touched: *mut u8,
    ) -> c_int;

    pub(super) fn replay_detach_output(tensor: *const C_tensor, aliases: c_int, out: *mut *mut C_tensor) -> c_int;
    pub(super) fn replay_copy(tensor: *const C_tensor, out: *mut *mut C_tensor) -> c_int;
    pub(super) fn replay_fingerprint(tensor: *const C_tensor, out: *mut Fingerprint) -> c_int;
    pub(super) fn replay_same_bits(a: *const C_tensor, b: *const C_tensor, out: *mut c_int) -> c_int;
    pub(super) fn replay_keeps_values(
        buffer: *const C_tensor,
        value: *const C_tensor,
        before: *const Fingerprint,
        out: *mut c_int,
    ) -> c_int;
    pub(super) fn replay_differing(
        tensors: *const *const C_tensor,
        values: *const *const C_tensor,
        before: *const Fingerprint,
        n: usize,
        from: usize,
        versions: c_int,
        out: *mut usize,
    ) -> c_int;
    pub(super) fn replay_put_values(tensor: *const C_tensor, value: *const C_tensor, version: u64) -> c_int;
    pub(super) fn replay_impl(tensor: *const C_tensor) -> usize;
    pub(super) fn replay_storage(tensor: *const C_tensor) -> usize;
    pub(super) fn replay_owns_storage(tensor: *const C_tensor) -> c_int;
    pub(super) fn replay_counter(tensor: *const C_tensor) -> usize;
    pub(super) fn replay_storage_nbytes(tensor: *const C_tensor) -> u64;
    pub(super) fn replay_nbytes(tensor: *const C_tensor) -> u64;
    pub(super) fn replay_get_grad(tensor: *const C_tensor, out: *mut *mut C_tensor) -> c_int;
    pub(super) fn replay_take_grad(tensor: *const C_tensor, out: *mut *mut C_tensor) -> c_int;
    pub(super) fn replay_add_grad(
        tensor: *const C_tensor,
        old: *const C_tensor,
        widen: c_int,
        copied: *mut u64,
    ) -> c_int;
    pub(super) fn replay_set_grad(tensor: *const C_tensor, grad: *const C_tensor) -> c_int;

    pub(super) fn replay_saved_new(tensor: *const C_tensor, on_host: c_int, out: *mut *mut CSaved) -> c_int;
    pub(super) fn replay_saved_is(saved: *const CSaved, tensor: *const C_tensor) -> c_int;
    pub(super) fn replay_saved_leaf(saved: *const CSaved, requires_grad: c_int, out: *mut *mut C_tensor) -> c_int;
    pub(super) fn replay_saved_fingerprint(saved: *const CSaved, out: *mut Fingerprint) -> c_int;
    pub(super) fn replay_saved_free(saved: *mut CSaved);
    pub(super) fn replay_weak_new(tensor: *const C_tensor) -> *mut CWeak;
    pub(super) fn replay_weak_lock(weak: *const CWeak) -> *mut C_tensor;
    pub(super) fn replay_weak_free(weak: *mut CWeak);

    pub(super) fn replay_inference_mode() -> c_int;
    #[cfg(test)]
    pub(super) fn replay_inference_enter() -> *mut c_void;
    #[cfg(test)]
    pub(super) fn replay_inference_leave(guard: *mut c_void);
    pub(super) fn replay_modes_get(out: *mut Modes) -> c_int;
    pub(super) fn replay_modes_set(modes: *const Modes) -> c_int;
    pub(super) fn replay_autocast_enter(device_type: c_int, enabled: c_int, dtype: c_int) -> c_int;
    pub(super) fn replay_autocast_leave(device_type: c_int, enabled: c_int, dtype: c_int) -> c_int;
    pub(super) fn replay_autocast_clear_cache() -> c_int;
    pub(super) fn replay_autocast_nesting() -> c_int;
    pub(super) fn replay_autocast_end_beyond(nesting: c_int) -> c_int;
    pub(super) fn replay_rng_read(device_type: c_int, index: c_int, out: *mut *mut CGenerator) -> c_int;
    pub(super) fn replay_rng_write(state: *const CGenerator) -> c_int;
    pub(super) fn replay_rng_stands(state: *const CGenerator, out: *mut c_int) -> c_int;
    pub(super) fn replay_rng_equal(a: *const CGenerator, b: *const CGenerator, out: *mut c_int) -> c_int;
    pub(super) fn replay_rng_free(state: *mut CGenerator);
    pub(super) fn replay_rng_bytes(device_type: c_int, index: c_int, out: *mut *mut C_tensor) -> c_int;
    pub(super) fn replay_rng_set_bytes(device_type: c_int, index: c_int, bytes: *const C_tensor) -> c_int;
    pub(super) fn replay_draws_register(join: c_int) -> c_int;
    pub(super) fn replay_draws_shared() -> c_int;
    pub(super) fn replay_draws_hold();
    pub(super) fn replay_draws_release();
    pub(super) fn replay_watch_begin(cuda_index: c_int, out: *mut *mut CWatch) -> c_int;
    pub(super) fn replay_watch_state(watch: *const CWatch, device_type: c_int, out: *mut *mut CGenerator) -> c_int;
    pub(super) fn replay_watch_end(watch: *mut CWatch);
    pub(super) fn replay_live_install() -> c_int;
    pub(super) fn replay_live_bytes() -> u64;
    pub(super) fn replay_live_peak() -> u64;
    pub(super) fn replay_live_reset_peak();
    pub(super) fn replay_has_cuda() -> c_int;
    pub(super) fn replay_version(out: *mut c_char, capacity: usize) -> c_int;

    pub(super) fn replay_tape_install(may_unwind: extern "C" fn() -> c_int) -> c_int;
    pub(super) fn replay_storage_set_new(
        tensors: *const *const C_tensor,
        n: usize,
        out: *mut *mut CStorageSet,
    ) -> c_int;
    pub(super) fn replay_storage_set_free(set: *mut CStorageSet);
    pub(super) fn replay_tape_new(
        block: *const c_char,
        inputs: *const *const C_tensor,
        n_inputs: usize,
        variables: *const CStorageSet,
        cuda_index: c_int,
        out: *mut *mut CTape,
    ) -> c_int;
    pub(super) fn replay_tape_free(tape: *mut CTape);
    pub(super) fn replay_tape_enter(tape: *const CTape, what: c_int) -> c_int;
    pub(super) fn replay_tape_leave();
    pub(super) fn replay_tape_stopping() -> c_int;
    pub(super) fn replay_tape_info(tape: *const CTape, out: *mut TapeInfo);
    pub(super) fn replay_tape_check(tape: *const CTape) -> c_int;
    pub(super) fn replay_graph_new(
        tape: *const CTape,
        rollout: u64,
        block: *const c_char,
        outputs: *const *const C_tensor,
        n_outputs: usize,
        leaves: *const *const C_tensor,
        n_leaves: usize,
        out: *mut *mut CGraph,
    ) -> c_int;
    pub(super) fn replay_graph_end_record(graph: *mut CGraph) -> c_int;
    pub(super) fn replay_graph_drop_tensors(graph: *mut CGraph) -> c_int;
    pub(super) fn replay_graph_free(graph: *mut CGraph);

    pub(super) fn replay_store_tcp(
        host: *const c_char,
        port: c_int,
        serves: c_int,
        workers: usize,
        timeout_ms: i64,
        out: *mut *mut CStore,
    ) -> c_int;
    pub(super) fn replay_store_file(
        path: *const c_char,
        workers: usize,
        timeout_ms: i64,
        out: *mut *mut CStore,
    ) -> c_int;
    pub(super) fn replay_store_free(store: *mut CStore);
    pub(super) fn replay_group_new(
        store: *const CStore,
        prefix: *const c_char,
        rank: c_int,
        world: c_int,
        timeout_ms: i64,
        out: *mut *mut CGroup,
    ) -> c_int;
    #[cfg(feature = "nccl")]
    pub(super) fn replay_group_add_nccl(group: *mut CGroup, rank: c_int, device: c_int, timeout_ms: i64) -> c_int;
    pub(super) fn replay_group_free(group: *mut CGroup);
    pub(super) fn replay_group_note(group: *const CGroup, key: *const c_char, text: *const c_char) -> c_int;
    pub(super) fn replay_group_read_note(
        group: *const CGroup,
        key: *const c_char,
        out: *mut c_char,
        capacity: usize,
    ) -> c_int;
    pub(super) fn replay_group_all_gather(group: *const CGroup, all: *mut C_tensor, own: *const C_tensor) -> c_int;
    pub(super) fn replay_group_gather_pieces(
        group: *const CGroup,
        wholes: *const *mut C_tensor,
        n: usize,
        out: *mut *mut CWorks,
    ) -> c_int;
    pub(super) fn replay_group_exchange_pieces(
        group: *const CGroup,
        received: *const *mut C_tensor,
        pieces: *const *mut C_tensor,
        n: usize,
        out: *mut *mut CWorks,
    ) -> c_int;
    pub(super) fn replay_works_wait(works: *mut CWorks) -> c_int;
    pub(super) fn replay_works_free(works: *mut CWorks);
    pub(super) fn replay_group_broadcast(group: *const CGroup, tensor: *mut C_tensor, root: c_int) -> c_int;

    pub(super) fn replay_optim_slot(kind: c_int, slot: usize) -> *const c_char;
    pub(super) fn replay_optim_new(kind: c_int, options: *const OptimizerOptions, out: *mut *mut COptim) -> c_int;
    pub(super) fn replay_optim_free(optim: *mut COptim);
    pub(super) fn replay_optim_add_group(optim: *mut COptim) -> c_int;
    pub(super) fn replay_optim_add_parameter(
        optim: *mut COptim,
        parameter: *const C_tensor,
        group: usize,
        name: *const c_char,
    ) -> c_int;
    pub(super) fn replay_optim_step(optim: *mut COptim) -> c_int;
    pub(super) fn replay_optim_set(optim: *mut COptim, group: usize, setting: c_int, value: f64) -> c_int;
    pub(super) fn replay_optim_lr(optim: *const COptim, group: usize, out: *mut f64) -> c_int;
    pub(super) fn replay_optim_state(
        optim: *const COptim,
        parameter: usize,
        exists: *mut c_int,
        step: *mut i64,
        tensors: *mut *mut C_tensor,
    ) -> c_int;
    pub(super) fn replay_optim_set_state(
        optim: *mut COptim,
        parameter: usize,
        step: i64,
        tensors: *const *const C_tensor,
    ) -> c_int;
    pub(super) fn replay_optim_drop_state(optim: *mut COptim, parameter: usize) -> c_int;
}
