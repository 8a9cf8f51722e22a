"""Why a run is its base weights, its seeds and its scalars, with one exercise."""
