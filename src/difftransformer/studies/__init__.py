"""Studies: axes to runs to statistics."""

from .._lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".comparison": ("compare",),
        ".evaluation": ("draw_tasks", "evaluate_checkpoint"),
        ".export": ("Exported", "export_folder"),
        ".jobs": ("Job",),
        ".recipe": ("CompareConfig", "Recipe", "load_recipe", "recipe_dict", "recipe_from", "save_recipe"),
        ".upcycling": ("upcycling_study",),
        ".run": ("start_run", "train_run", "trained_model"),
    },
)
