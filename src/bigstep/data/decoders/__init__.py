"""Ways from the bytes of image files to crops: one file each, named in `bigstep.tables.decoders`."""
