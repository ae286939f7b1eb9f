"""Studies: axes to runs to statistics."""

from typing import TYPE_CHECKING

from difftransformer._lazy import lazy_names

if TYPE_CHECKING:
    from .comparison import compare, upcycle_and_train
    from .design import Design, StudyConfig, load_study
    from .evaluation import draw_tasks, evaluate_checkpoint
    from .jobs import Job, watched_by
    from .recipe import CompareConfig, Recipe, load_recipe, recipe_dict, recipe_from, save_recipe
    from .run import start_run, train_run
    from .study import Study

__getattr__, __dir__, __all__ = lazy_names(__name__)
