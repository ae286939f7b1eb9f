"""What every picture is drawn with: colours, marks, curves and bars. Imports neither torch nor transformers."""
