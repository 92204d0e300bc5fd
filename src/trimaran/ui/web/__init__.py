"""The web page of `trimaran ui`. Only this package imports NiceGUI, and only when the command runs."""
