//! The same numbers as the Python reference: outputs, losses and gradients of many small configurations, which
//! `tests/parity/generate.py` computed with it, and, where we differ on purpose, what holds instead.
//!
//! Both run LibTorch's kernels on one thread, but the reference's forward runs without grad mode, where some kernels
//! are others, and the files may come from another processor. So a tensor may differ by 1e-5 of its largest value in
//! f32, by 1e-12 in f64, and by 2^-6 under autocast to bfloat16.

#[path = "parity/differences.rs"]
mod differences;
#[path = "parity/inputs.rs"]
mod inputs;
#[path = "parity/layers.rs"]
mod layers;
#[path = "parity/modes.rs"]
mod modes;
#[path = "parity/rollouts.rs"]
mod rollouts;
#[path = "parity/run.rs"]
mod run;

/// One test for each configuration, which is a function of that module, and has a file of its name.
macro_rules! configurations {
    ($($module:ident: $($name:ident)*;)*) => {
        $($(
            #[test]
            fn $name() {
                $module::$name(stringify!($name));
            }
        )*)*

        const NAMES: &[&str] = &[$($(stringify!($name)),*),*];
    };
}

configurations! {
    rollouts:
        one_block
        a_chain_of_two_blocks
        a_chain_of_three_blocks_in_f64
        a_chain_of_four_blocks
        a_chain_of_five_blocks
        a_chain_of_five_blocks_in_f64
        two_outputs
        one_output_of_three_is_unused
        an_output_read_by_two_blocks
        metadata_that_differs_from_block_to_block
        blocks_inside_blocks
        gradients_of_three_backward_passes
        plain_code_between_blocks
        a_state_detached_between_blocks
        three_models_in_one_rollout;
    modes:
        a_context_that_restores_what_blocks_read
        dropout_in_one_block
        dropout_in_five_blocks
        noise_of_several_kinds
        numbers_drawn_between_blocks
        blocks_with_dropout_inside_blocks
        autocast_around_three_blocks
        autocast_around_one_block_of_three;
    layers:
        a_gru_cell_over_four_steps
        an_lstm_layer
        convolutions
        a_strided_convolution_in_f64
        self_attention
        causal_attention_in_f64
        attention_with_a_boolean_mask
        attention_with_a_trained_bias
        attention_under_autocast
        layer_norm_and_a_wide_layer
        batch_norm_in_eval_mode
        an_embedding_of_integer_tokens
        a_classifier_with_integer_targets
        a_weight_used_four_times_in_each_block
        weights_tied_inside_a_block
        weights_tied_between_two_blocks;
    inputs:
        some_inputs_without_grad
        parameters_alone_get_gradients
        some_parameters_are_frozen
        all_parameters_are_frozen
        integer_and_boolean_inputs
        the_same_tensor_as_two_inputs
        an_expanded_input
        transposed_and_strided_inputs
        scalar_and_empty_inputs
        inputs_of_two_kinds
        a_trained_tensor_that_blocks_capture
        integer_and_boolean_outputs
        views_and_inputs_as_outputs
        operations_in_place_inside_a_block
        an_output_changed_in_place_by_the_caller;
    differences:
        old_gradients_are_added_to
        a_detached_output_does_not_require_grad
        where_nothing_is_trained_no_output_requires_grad
        parameters_may_be_used_outside_of_blocks_too
        blocks_inside_blocks_share_the_sums
        a_region_without_autocast_is_differentiated_without_it
        a_tensor_with_a_history_must_be_an_input
        an_input_that_was_changed_is_an_error
        a_parameter_that_was_changed_is_an_error
        a_parameter_that_was_frozen_is_an_error
        a_block_that_changes_its_input_is_an_error
        a_block_that_updates_statistics_is_an_error
        a_replay_that_draws_other_numbers_is_an_error
        a_replay_that_detaches_an_output_is_an_error
        a_failed_replay_gives_old_gradients_back
        a_context_that_fails_names_its_block_and_gives_old_gradients_back
        a_second_backward_pass_is_an_error
        a_second_derivative_is_taken_inside_a_block;
}

#[test]
fn every_file_has_a_test_and_every_test_a_file() {
    let files = std::fs::read_dir(run::folder()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut files: Vec<_> = files.map(|name| name.into_string().unwrap()).collect();
    files.sort();
    let mut expected: Vec<_> = NAMES.iter().map(|name| format!("{name}.safetensors")).collect();
    expected.sort();
    assert_eq!(files, expected);
}

/// The header is JSON text behind eight bytes of length.
#[test]
fn every_file_was_made_with_the_torch_that_is_tested() {
    for name in NAMES {
        let bytes = std::fs::read(run::folder().join(name).with_extension("safetensors")).unwrap();
        let header = String::from_utf8_lossy(&bytes[8..]);
        assert!(header.starts_with(r#"{"__metadata__":{"made by":"torch 2.13.0"#), "{name}");
    }
}
