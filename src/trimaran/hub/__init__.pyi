"""Public names of `trimaran.hub`, and the modules that they come from. They are imported on first use."""

from .fetch_dataset import dataset_folder as dataset_folder, split_of_folder as split_of_folder
from .hub_errors import HubRepo as HubRepo, hub_error as hub_error
from .hub_names import (
    hub_repo_of as hub_repo_of, is_hub_name as is_hub_name, near_folder as near_folder, repo_name as repo_name,
)
