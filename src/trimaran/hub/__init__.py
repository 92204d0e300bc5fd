"""Files of the Hugging Face Hub: names, and what is fetched into the local cache before ranks start. No torch."""

from trimaran.hub.hub_names import hub_repo_of, is_hub_name, near_folder, repo_name

__all__ = ["hub_repo_of", "is_hub_name", "near_folder", "repo_name"]
