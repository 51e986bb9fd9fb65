"""A configuration comes in; the settings of its own framework that train fastest, and how sure that is, go out.

`space` says what may be changed, `trial` what a change brings, `search` finds changes that pay, `answer` confirms them.
"""
